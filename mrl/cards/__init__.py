"""Model card (README.md) of an exported model, made from the files of its run, or of the models that were merged."""

from mrl.cards.facts import Facts, Origin
from mrl.cards.merged import merged_card
from mrl.cards.write import card_of, write_card

__all__ = ["Facts", "Origin", "card_of", "merged_card", "write_card"]
