"""Configuration of each trainer, one file each: its keys, and what they mean to packages that know no trainer.

The table of all trainers is in `table`.
"""
