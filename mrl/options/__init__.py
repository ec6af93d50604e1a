"""What an algorithm can be told: its keys with their defaults, bounds and meaning. No torch: configurations are made of
these, and the functions of mrl.algo take them as arguments of the same names."""
