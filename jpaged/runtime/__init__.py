"""The device side: all that calls JAX. `runner.ModelRunner` is what the engine sees of it.

Imports run one way: `runner` -> `parallel`, `compile` -> `memory` -> `step` -> `sampling`, `store`. `prediction` is for
`jpaged plan`. The other modules of this folder serve all of them: the devices (`placement`, `targets`), the arrays on
them (`state`), and JAX's settings. Weights are cut across devices in `jpaged.models.shard_weights`.
"""
