"""How often the drafts of a request are accepted."""

import dataclasses

FIRST_CHANCE = 0.7     # of a drafter that was never used: high enough to try it
PRIOR_WEIGHT = 2.0     # the prior counts as this many drafts
DECAY = 0.85           # of a request's counts, with each verify step
OVERALL_DECAY = 0.995  # of the drafter's counts, with each row of a verify step
MOST_CHANCE = 0.99
REJECTED_STEPS = 6     # verify steps without an accepted draft after which a row pauses
FIRST_PAUSE = 16       # steps of its first pause. Each pause that follows a pause without success is twice as long
LONGEST_PAUSE = 1024


@dataclasses.dataclass(slots=True, eq=False)
class AcceptRate:
    """Acceptance of one request's drafts. `DraftBudget` writes it.

    Draft j is accepted only if the drafts before it are. So one probability describes a row: draft j is accepted with
    chance**j. A step tests its accepted drafts and the first rejected one; it says nothing about later drafts.
    """

    chance: float = FIRST_CHANCE  # that a draft is accepted if the drafts before it were
    tested: float = 0.0           # drafts that were tested, decayed
    accepted: float = 0.0         # of them, accepted
    num_rejected: int = 0         # last verify steps in which no draft was accepted
    pause: int = 0                # steps of the last pause. 0: none since a draft was accepted
    paused_until: int = 0         # step of the budget from which the row may have drafts again

    def note(self, drafted: int, accepted: int, decay: float, prior: float) -> None:
        """Count the drafts of one verify step. prior: the chance of a request without counts."""
        self.tested = self.tested * decay + min(accepted + 1, drafted)
        self.accepted = self.accepted * decay + accepted
        self.chance = min((self.accepted + PRIOR_WEIGHT * prior) / (self.tested + PRIOR_WEIGHT), MOST_CHANCE)

    def pause_if_rejected(self, accepted: int, step: int, prior: float) -> None:
        """Pause the row after too many steps without an accepted draft. It starts again with the prior."""
        if accepted:
            self.num_rejected = self.pause = 0
            return
        self.num_rejected += 1
        if self.num_rejected >= REJECTED_STEPS or self.pause:
            self.pause = min(2 * self.pause or FIRST_PAUSE, LONGEST_PAUSE)
            self.paused_until = step + self.pause
            self.tested = self.accepted = 0.0
            self.chance, self.num_rejected = prior, 0
