"""README.md of an exported model: what it is and how it was made, from the files of its run, or of what it was merged
of, alone."""

from mrl.cards.facts import Facts, Origin
from mrl.cards.merged import merged_card
from mrl.cards.write import card_of, write_card

__all__ = ["Facts", "Origin", "card_of", "merged_card", "write_card"]
