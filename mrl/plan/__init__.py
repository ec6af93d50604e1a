"""What a run will need, before it holds a GPU: memory by rank and phase, seconds, the batch in numbers, who is where.

`of` makes it of a configuration and a cluster, in arithmetic alone: no torch. `proof` builds what it speaks of.
"""
