"""How often the drafts of a request are accepted."""

import dataclasses

FIRST_CHANCE = 0.7     # of a drafter that was never used: high enough to try it
PRIOR_WEIGHT = 2.0     # the prior counts as this many drafts
DECAY = 0.96           # of a request's counts, with each verify step
OVERALL_DECAY = 0.995  # of the drafter's counts, with each row of a verify step
MOST_CHANCE = 0.99
REJECTED_STEPS = 32    # verify steps without an accepted draft after which a row pauses: 1% of rows with chance 0.13
LOW_CHANCE = 0.05      # least chance of a row that does not pause. With this chance after LOW_TESTED drafts it pauses
LOW_TESTED = 15
LEAST_START = 0.1      # least chance of a row without counts: it is tried even if the drafter was useless so far
REJECTED_AGAIN = 8     # the same, after a pause
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
        chance = (self.accepted + PRIOR_WEIGHT * prior) / (self.tested + PRIOR_WEIGHT)
        self.chance = min(max(chance, LOW_CHANCE), MOST_CHANCE)

    def pause_if_rejected(self, accepted: int, step: int, prior: float) -> None:
        """Pause the row if its drafts are rejected again and again. It starts again with the prior."""
        if accepted:
            self.num_rejected = self.pause = 0
        else:
            self.num_rejected += 1
        is_low = self.chance <= LOW_CHANCE and self.tested > LOW_TESTED
        if is_low or self.num_rejected >= (REJECTED_AGAIN if self.pause else REJECTED_STEPS):
            self.pause = min(2 * self.pause or FIRST_PAUSE, LONGEST_PAUSE)
            self.paused_until = step + self.pause
            self.tested = self.accepted = 0.0
            self.chance, self.num_rejected = prior, 0
