"""The device side of the engine: programs and arrays. The engine runs all steps through `runner.ModelRunner`.

Imports run one way: `runner` -> `parallel`, `compile` -> `memory` -> `step` -> `sampling`, `store`. All of them may use
the other modules of this folder: devices (`placement`, `targets`), device arrays (`state`) and JAX's settings.
`prediction` is for `jpaged plan`. `jpaged.models.shard_weights` splits the weights across devices.
"""
