"""Options of the algorithms: keys with defaults, bounds and meaning.

No torch: configurations are made of these, and the functions of mrl.algo take them as arguments of the same names.
"""
