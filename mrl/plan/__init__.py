"""Plan of a run before it holds a GPU: memory by rank and phase, seconds, batch sizes, placement of ranks.

`plan.make` computes it from a configuration and a cluster, in arithmetic alone, without torch. `proof` builds the
models it describes.
"""
