"""Speculative decoding on the host: proposes drafts, and decides how many drafts a step checks.

A *drafter* proposes the tokens that may follow a request's known tokens. A verify step computes the drafts together
with the last token, samples at each position, and accepts a draft if it equals the sample. So drafts change the speed
of an answer, never its tokens.

| Module | Drafts come from |
|---|---|
| `ngram.py` | the last earlier occurrence of the last tokens in the same request |
| `suffix.py` | the most frequent continuation, in the same request and in earlier answers |
| `prediction.py` | a text that the caller expects the answer to equal |
| `function.py` | a Python function of the user |

`DraftBudget` (`draft_budget.py`) gives each row of a step its number of drafts. It learns the acceptance of every
request and the seconds of every program. Python and numpy only: drafters on the device are part of the runtime.
"""
