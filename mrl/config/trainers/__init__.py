"""A file a trainer: its keys, and what they mean to the parts that know no trainer. `table` has them all."""
