"""Model card (README.md) of an exported model, made from the files of its run, or of the models that were merged."""

from mrl.cards.facts import CardFacts, WeightsOrigin
from mrl.cards.merged import merged_card
from mrl.cards.write import write_card, write_run_card

__all__ = ["CardFacts", "WeightsOrigin", "write_run_card", "merged_card", "write_card"]
