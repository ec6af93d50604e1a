"""Configurations with one mistake in the data sources, and the expected error."""

from __future__ import annotations

from tests.helpers.bad_configs import SFT, Bad

BAD_DATA = [
    Bad(
        "no data",
        "  train: train.jsonl",
        "  train: nowhere.jsonl",
        "data.train",
        ("'nowhere.jsonl' is not on this machine",),
    ),
    Bad(
        "unknown format",
        "  train: train.jsonl",
        "  train: plain.txt",
        "data.train",
        ("not in a format", "FILE.parquet"),
    ),
    Bad(
        "rows of another form",
        "  train: train.jsonl",
        "  train: talks.jsonl",
        "data.form",
        ("answers needs 'prompt' and 'answer', and the first row of talks.jsonl has messages: set it to messages",),
        "data:",
        base=SFT,
    ),
    Bad("data is not JSON", "  train: train.jsonl", "  train: plain.jsonl", "data.train", ("not a JSON object",)),
    Bad(
        "wrong column",
        "  train: train.jsonl",
        "  train: train.jsonl\n  prompt_key: question",
        "data.prompt_key",
        ("no 'question'", "prompt, answer"),
    ),
    Bad(
        "a chat for raw text",
        "  train: train.jsonl",
        "  train: chat.jsonl",
        "data.chat_template",
        ("has a list of messages", "data.train (c.yaml:17)"),
        "data:",
    ),
    Bad(
        "a key of a source",
        "  train: train.jsonl",
        "  train: [{path: train.jsonl, wieght: 2.0}]",
        "data.train.wieght",
        ("unknown key; did you mean weight?",),
    ),
    Bad(
        "sources of another kind", "  train: train.jsonl", "  train: 3", "data.train", ("a path, a section or a list",)
    ),
    Bad("no sources", "  train: train.jsonl", "  train: []", "data.train", ("has no sources",)),
    Bad(
        "names a source twice",
        "  train: train.jsonl",
        "  train: [train.jsonl, train.jsonl]",
        "data.train",
        ("names a source twice",),
    ),
    Bad(
        "weight of the only source",
        "  train: train.jsonl",
        "  train: {path: train.jsonl, weight: 2.0}",
        "data.train",
        ("the weight of train.jsonl has no effect", "only source"),
    ),
    Bad(
        "weights for some",
        "  train: train.jsonl",
        "  train: [{path: train.jsonl, weight: 2.0}, more.jsonl]",
        "data.train",
        ("more.jsonl without weight",),
    ),
    Bad(
        "weights of a validation",
        "  train: train.jsonl",
        "  train: train.jsonl\n  validation: [{path: train.jsonl, weight: 2.0}, {path: more.jsonl, weight: 1.0}]",
        "data.validation",
        ("weights have no effect", "validation.prompts"),
    ),
    Bad(
        "a split of a file",
        "  train: train.jsonl",
        "  train: {path: train.jsonl, split: test}",
        "data.train",
        ("split 'test' has no effect", "one file"),
    ),
    Bad(
        "a name for rows that have one",
        "  train: train.jsonl",
        "  train: {path: train.jsonl, name: sums}\n  data_source_key: answer",
        "data.train",
        ("the name 'sums' of train.jsonl has no effect", "data.data_source_key (c.yaml:18)"),
        "  train: {path",
    ),
    Bad(
        "sft has no held-out rows",
        "  samples_per_step: 8\n",
        "  samples_per_step: 8\nvalidation:\n  patience: 2\n",
        "validation.patience",
        ("no effect: there are no held-out rows", "data.validation"),
        base=SFT,
    ),
    Bad(
        "demonstrations without answers",
        "reward:",
        "ptx:\n  coef: 0.1\n  samples_per_update: 8\n"
        "  data: {train: chat.jsonl, chat_template: true, answer_key: solution, max_prompt_tokens: 8}\nreward:",
        "ptx.data.answer_key",
        ("the first row of chat.jsonl has no 'solution'", "ptx.data.train"),
        "  data: {",
    ),
    Bad(
        "demonstrations are not validated",
        "reward:",
        "ptx:\n  data: {train: more.jsonl, validation: more.jsonl, max_prompt_tokens: 8}\n  coef: 0.1\n"
        "  samples_per_update: 8\nreward:",
        "ptx.data.validation",
        ("no effect", "with ptx (c.yaml"),
        "  data: {",
    ),
    Bad(
        "sft without answers",
        "  train: train.jsonl",
        "  train: train.jsonl\n  answer_key: solution",
        "data.answer_key",
        ("no 'solution'",),
        base=SFT,
    ),
    Bad(
        "demonstrations by source",
        "reward:",
        "ptx:\n  data: {train: more.jsonl, data_source_key: task, max_prompt_tokens: 8}\n  coef: 0.1\n"
        "  samples_per_update: 8\nreward:",
        "ptx.data.data_source_key",
        ("no effect: demonstrations have no rewards or metrics by source", "with ptx (c.yaml"),
        "  data: {",
    ),
    Bad(
        "a source of demonstrations with a name",
        "reward:",
        "ptx:\n  data: {train: {path: more.jsonl, name: sums}, max_prompt_tokens: 8}\n  coef: 0.1\n"
        "  samples_per_update: 8\nreward:",
        "ptx.data.train",
        ("the name 'sums' of more.jsonl has no effect", "with ptx (c.yaml"),
        "  data: {",
    ),
    Bad(
        "the last turn of an answer that has one",
        "  train: train.jsonl",
        "  train: train.jsonl\n  train_on: last",
        "data.train_on",
        ("no effect: without a chat template an answer is one text", "data.chat_template (default)"),
        base=SFT,
    ),
]
