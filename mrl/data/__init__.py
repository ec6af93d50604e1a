"""Data sets, tokenizer, packing, and balance over data-parallel ranks and micro-batches."""

from mrl.data.balance import plan_micro_batches
from mrl.data.collate import collate
from mrl.data.columns import conversation, read_template_variables
from mrl.data.dataset import PromptDataset, data_notes
from mrl.data.errors import DataError
from mrl.data.image_prompts import load_image_processor
from mrl.data.packing import pack, sequence_align
from mrl.data.preference import PreferenceDataset, preference_notes
from mrl.data.sft import SFTDataset, sft_notes
from mrl.data.tokenizer import Tokenizer, TokenizerError, hf_tokenizer, load_tokenizer

__all__ = [
    "DataError",
    "PreferenceDataset",
    "PromptDataset",
    "SFTDataset",
    "Tokenizer",
    "TokenizerError",
    "collate",
    "conversation",
    "data_notes",
    "hf_tokenizer",
    "load_image_processor",
    "load_tokenizer",
    "pack",
    "plan_micro_batches",
    "preference_notes",
    "sequence_align",
    "sft_notes",
    "read_template_variables",
]
