"""Unusable files, rows, templates, functions and overrides, with the expected error."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tests.helpers.bad_configs import PPO, Bad

HALF = "\ud800"


@dataclass(frozen=True)
class BadInput:
    """Contents of a file (or an override), and words that its one-line error must contain."""

    id: str
    contents: bytes
    says: tuple[str, ...]


def _text(name: str, contents: str, *says: str) -> BadInput:
    return BadInput(name, contents.encode(errors="surrogatepass"), says)


def _bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


def _ladder(levels: int) -> str:
    return "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, levels))])


FILES = [  # config.yaml
    _text(
        "alias that contains itself",
        "run: &r\n  name: *r\n",
        "c.yaml:2",
        "*r refers to a part of the file that contains",
    ),
    _text("list that contains itself", "run: &r [*r]\n", "c.yaml:1", "that contains it"),
    _text("merge of itself", "run: &r\n  <<: *r\n", "c.yaml:2", "that contains it"),
    _text("anchor bomb", _bomb(12), "c.yaml:5", "more than 20000 values"),
    _text("merge bomb", _bomb(4) + "\nrun: {<<: [*a3, *a3, *a3, *a3]}", "more than 20000 values"),
    _text("deep through aliases", _ladder(3000), "more than 50 levels"),
    _text("deep list", "run: " + "[" * 5000 + "]" * 5000, "c.yaml:1", "more than 50 levels deep"),
    _text("deep sections", "\n".join(" " * i + f"k{i}:" for i in range(400)), "more than 50 levels deep"),
    _text("NUL", "run:\n  name: a\0b\n", "c.yaml:2", "U+0000 is not allowed"),
    _text("control character", "run:\n\n  name: a\x07b\n", "c.yaml:3", "U+0007 is not allowed"),
    _text("escaped NUL", 'run:\n  name: "a\\0b"\n', "c.yaml:2", "run.name", "U+0000"),
    _text("escaped surrogate", 'run:\n  name: "\\ud800"\n', "c.yaml:2", "run.name", "U+D800"),
    BadInput("not UTF-8", b"run:\n  name: \xff\xfe\n", ("cannot read c.yaml", "utf-8")),
    BadInput("UTF-16", "trainer: rl\n".encode("utf-16"), ("cannot read c.yaml", "utf-8")),
    _text("key twice", PPO.replace("steps: 20", "steps: 20\n  steps: 21"), "c.yaml:5: run.steps", "first at c.yaml:4"),
    _text("merge twice", PPO.replace("nproc: 4", "<<: {}\n  nproc: 4\n  <<: {seed: 3}"), "written twice"),
    _text("merge of a number", PPO.replace("nproc: 4", "nproc: 4\n  <<: 3"), "c.yaml:6: run", "<< takes a section"),
    _text("key that is a list", PPO + "? [a, b]\n: 3\n", "a key must be a name, got a list"),
    _text("key on two lines", PPO + '"a\\nb": 3\n', "a key must be a name, got 'a\\nb'"),
    _text("long key", PPO + "k" * 900 + ": 3\n", "a key must be a name", "(900 characters)"),
    _text("long file", PPO + "#" * 300_000, "the limit for a configuration"),
    _text(
        "Python object", "run: !!python/object/apply:os.getcwd []\n", "c.yaml:1", "python/object", "is not supported"
    ),
    _text("tag of a number", PPO.replace("20", "!!bool maybe"), "c.yaml:4", "tag:yaml.org,2002:bool is not"),
    _text("unknown alias", "run: *gone\n", "c.yaml:1", "undefined alias"),
    _text("two documents", "run: 1\n---\nrun: 2\n", "c.yaml:2", "another document"),
    _text("endless digits", PPO.replace("steps: 20", "steps: " + "9" * 5000), "c.yaml:4: run.steps", "5000 digits"),
    _text("base with NUL", 'base: "a\\0b"\n', "c.yaml:1: base"),
    _text("base with a long name", f"base: {'n' * 300}.yaml\n", "c.yaml:1: base", "name too long"),
    _text("base is a directory", "base: .\n", "c.yaml:1: base: cannot read", "a directory"),
    _text("base is a device", "base: /dev/zero\n", "c.yaml:1: base: cannot read", "a device, a pipe or a socket"),
    _text("base is a pipe", "base: pipe\n", "c.yaml:1: base: cannot read", "a device, a pipe or a socket"),
    _text("base of itself", "base: c.yaml\n", "c.yaml:1: base: bases form a circle"),
    _text("endless bases", "base: chain/0.yaml\n", "bases are more than 20 levels deep"),
]


def _bad(name: str, old: str, new: str, key: str, *says: str, at: str = "") -> Bad:
    return Bad(name, old, new, key, says, at)


VALUES = [  # replacements of one value in a valid configuration
    _bad("NaN", "lr: 1e-6", "lr: .nan", "actor.optimizer.lr", "must be a finite number, got nan"),
    _bad("infinity", "lr: 1e-6", "lr: .inf", "actor.optimizer.lr", "must be a finite number, got inf"),
    _bad("overflow", "lr: 1e-6", "lr: 1e999", "actor.optimizer.lr", "must be a finite number, got inf"),
    _bad("the word nan", "lr: 1e-6", "lr: nan", "actor.optimizer.lr", "must be a number, got 'nan' (a string)"),
    _bad("eps below float32", "lr: 1e-6", "eps: 1e-50", "actor.optimizer.eps", "a float32 between 1.2e-38"),
    _bad("above float32", "lr: 1e-6", "clip_grad: 1e39", "actor.optimizer.clip_grad", "a float32 between"),
    _bad("temperature below float32", "max_new_tokens: 8", "max_new_tokens: 8\n    temperature: 1e-45",
         "rollout.sampling.temperature", "a float32 between"),
    _bad("seed of 64 bits", "nproc: 4", "nproc: 4\n  seed: 9223372036854775808", "run.seed", "less than 922337203685"),
    _bad("seed below zero", "nproc: 4", "nproc: 4\n  seed: -1", "run.seed", "greater than or equal to 0"),
    _bad("steps without end", "steps: 20", "steps: 99999999999999", "run.steps", "less than or equal to 2147483647"),
    _bad("steps beyond 64 bits", "steps: 20", "steps: 99999999999999999999999", "run.steps", "2147483647"),
    _bad("a wait of a century", "nproc: 4", "nproc: 4\n  timeout_s: 3e9", "run.timeout_s", "longer than the maximum"),
    _bad("line break in a name", "name: test", 'name: "a\\nb"', "run.name", "contains a line break"),
    _bad("line break in an argument", "rollout:", 'rollout:\n  server_args: ["--port\\n3"]', "rollout.server_args",
         "'--port\\n3' contains a line break"),
    _bad("escape in a root", "name: test", 'name: test\n  root: "runs\\e[31m"', "run.root", "control character"),
    _bad("line break in a source", "train: train.jsonl", 'train: train.jsonl\n  answer_key: "a\\tb"', "data.answer_key",
         "contains a line break"),
    _bad("empty stop", "max_new_tokens: 8", "max_new_tokens: 8\n    stop: ['']", "rollout.sampling.stop",
         "'' would end a response"),
    _bad("stop token outside", "max_new_tokens: 8", "max_new_tokens: 8\n    stop_token_ids: [3, 16, -1]",
         "rollout.sampling.stop_token_ids", "16, -1: outside the model's vocabulary of 16 tokens"),
    _bad("a thousand engines", "rollout:", "rollout:\n  servers: 1000", "rollout.servers", "maximum is 64"),
    _bad("a million workers", "function: exact_match", "function: exact_match\n  workers: 1000000", "reward.workers",
         "less than or equal to 1024"),
    _bad("async reward", "function: exact_match", "function: odd.py:later", "reward.function", "an async function"),
    _bad("reward of two", "function: exact_match", "function: odd.py:two", "reward.function",
         "odd.py:two takes (prompt, response), but mrl calls it with (prompt, response, row)"),
    _bad("reward with a demand", "function: exact_match", "function: odd.py:keyword", "reward.function", "takes"),
    _bad("reward that is a number", "function: exact_match", "function: odd.py:NUMBER", "reward.function", "a value"),
    _bad("reward file is a directory", "function: exact_match", "function: dense:f", "reward.function", "a directory"),
    _bad("reward file with NUL", "function: exact_match", "function: nul.py:f", "reward.function", "read nul.py"),
    _bad("filter of none", "adv_estimator: gae", "adv_estimator: gae\n  filter_groups: {function: odd.py:nothing}",
         "algorithm.filter_groups.function", "takes (), but mrl calls it with (group)"),
    _bad("loss of none", "adv_estimator: gae", "adv_estimator: gae\n  policy_loss: {function: odd.py:nothing}",
         "algorithm.policy_loss.function", "takes (), but mrl calls it with (inputs)"),
    _bad("loss without a file", "adv_estimator: gae", "adv_estimator: gae\n  policy_loss: {function: gone.py:f}",
         "algorithm.policy_loss.function", "cannot read gone.py: No such file"),
    _bad("loss by another name", "adv_estimator: gae", "adv_estimator: gae\n  policy_loss: {function: odd.py:tow}",
         "algorithm.policy_loss.function", "does not define 'tow'; it defines NUMBER, keyword, later, nothing, two"),
    _bad("loss of mrl as a file", "adv_estimator: gae", "adv_estimator: gae\n  policy_loss: {function: gspo}",
         "algorithm.policy_loss.function", "'gspo' does not name a function in a file: expected path/to/file.py:name"),
    _bad("option that a loss does not take", "adv_estimator: gae",
         "adv_estimator: gae\n  policy_loss: {function: odd.py:two, options: {slope: 2}}",
         "algorithm.policy_loss.function", "takes (prompt, response), but mrl calls it with (inputs, slope=)"),
    _bad("two losses", "adv_estimator: gae",
         "adv_estimator: gae\n  policy_loss: {loss_mode: gspo, function: odd.py:two}",
         "algorithm.policy_loss.function", "no effect: the loss is gspo", "a key of function",
         "algorithm.policy_loss.loss_mode (c.yaml:"),
    _bad("no function for the loss", "adv_estimator: gae", "adv_estimator: gae\n  policy_loss: {loss_mode: function}",
         "algorithm.policy_loss.function", "required key is missing"),
    _bad("a key under two names", "adv_estimator: gae",
         "adv_estimator: gae\n  policy_loss: {loss_mode: dppo_kl, clip_ratio_low: 0.1, divergence_low: 0.1}",
         "algorithm.policy_loss", "clip_ratio_low is the former name of divergence_low"),
    _bad("former name of a key that is too large", "adv_estimator: gae",
         "adv_estimator: gae\n  policy_loss:\n    loss_mode: dppo_tv\n    clip_ratio_low: 1.5",
         "algorithm.policy_loss.clip_ratio_low", "clip_ratio_low: must be below 1 for dppo_tv"),
    _bad("former name of a key that is no number", "adv_estimator: gae",
         "adv_estimator: gae\n  policy_loss:\n    loss_mode: dppo_tv\n    clip_ratio_low: x",
         "algorithm.policy_loss.clip_ratio_low", "must be a number, got 'x'"),
    _bad("dual clip beyond float32", "adv_estimator: gae", "adv_estimator: gae\n  policy_loss: {clip_ratio_c: 1e39}",
         "algorithm.policy_loss.clip_ratio_c", "a float32 between"),
    _bad("loss without a file's name", "adv_estimator: gae", "adv_estimator: gae\n  policy_loss: {function: ':f'}",
         "algorithm.policy_loss.function", "':f' does not name a function in a file"),
    _bad("misspelt key of another loss", "adv_estimator: gae",
         "adv_estimator: gae\n  policy_loss: {loss_mode: gspo, tau_negg: 2.0}", "algorithm.policy_loss.tau_negg",
         "unknown key; did you mean algorithm.policy_loss.tau_neg (a key of sapo)?"),
    _bad("another trainer's key", "prompts_per_step: 16", "prompts_per_step: 16\n  samples_per_step: 4",
         "batch.samples_per_step", "unknown key; it is a key of trainer sft, and this is trainer rl"),
    _bad("another loss's key", "adv_estimator: gae", "adv_estimator: gae\n  policy_loss: {tau_neg: 2.0}",
         "algorithm.policy_loss.tau_neg", "no effect: the loss is vanilla", "a key of sapo",
         "algorithm.policy_loss.loss_mode (default)"),
    _bad("misspelt key of a loss", "adv_estimator: gae",
         "adv_estimator: gae\n  policy_loss: {loss_mode: sapo, tau_negg: 2.0}",
         "algorithm.policy_loss.tau_negg", "unknown key; did you mean tau_neg?"),
    _bad("unknown loss", "adv_estimator: gae", "adv_estimator: gae\n  policy_loss: {loss_mode: gpso, tau_neg: 2.0}",
         "algorithm.policy_loss.loss_mode", "must be one of vanilla, gspo", "got 'gpso'", "did you mean gspo?"),
    _bad("estimator of none", "adv_estimator: gae", "advantage: {function: odd.py:nothing}",
         "algorithm.advantage.function", "takes (), but mrl calls it with (inputs)"),
    _bad("unknown estimator", "adv_estimator: gae", "adv_estimator: gea\n  lam: 0.9",
         "algorithm.adv_estimator", "must be one of gae, grpo", "did you mean gae?"),
    _bad("data is a device", "train: train.jsonl", "train: /dev/zero", "data.train", "a device, a pipe or a socket"),
    _bad("data is a pipe", "train: train.jsonl", "train: pipe.jsonl", "data.train", "a device, a pipe or a socket"),
    _bad("no data", "train: train.jsonl", "train: ''", "data.train", "'' is not on this machine"),
    _bad("data of the hub", "train: train.jsonl", "train: openai/gsm8k", "data.train", "(mrl downloads nothing)"),
    _bad("no lines", "train: train.jsonl", "train: none.jsonl", "data.train", "none.jsonl has no rows"),
    _bad("no items", "train: train.jsonl", "train: none.json", "data.train", "none.json has no rows"),
    _bad("no rows of parquet", "train: train.jsonl", "train: none.parquet", "data.train", "none.parquet has no rows"),
    _bad("data is any directory", "train: train.jsonl", "train: chain", "data.train", "a directory without data files"),
    _bad("data saved by halves", "train: train.jsonl", "train: halves", "data.train", "not a directory saved by"),
    _bad("data with a long name", "train: train.jsonl", f"train: {'n' * 300}.jsonl", "data.train", "name too long"),
    _bad("broken parquet", "train: train.jsonl", "train: bad.parquet", "data.train", "is not a Parquet file"),
    _bad("deep first row", "train: train.jsonl", "train: deep.jsonl", "data.train", "nested too deeply"),
    _bad("first row not UTF-8", "train: train.jsonl", "train: latin.jsonl", "data.train", "byte 0xe9 at position 13"),
]  # fmt: skip

GOOD_ROW = json.dumps({"prompt": "1+1=", "answer": "2"})


def _row(name: str, row: str, *says: str) -> BadInput:
    return _text(name, f"{GOOD_ROW}\n{row}\n", "rows.jsonl:2: ", *says)


ROWS = [  # rows.jsonl
    _row("deep row", '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    _row("lone surrogate", '{"prompt": "a\\ud800b", "answer": "1"}', "'\\ud800' is half of a character"),
    _row("surrogate in another column", '{"prompt": "a", "answer": "1", "note": "\\udfff"}', "half of a character"),
    _row("surrogate in a key", '{"prompt": "a", "answer": "1", "\\ud83d": 1}', "half of a character"),
    BadInput(
        "Latin-1",
        GOOD_ROW.encode() + b'\n{"prompt": "\xe9"}\n',
        ("rows.jsonl:2: not valid JSON: not UTF-8: byte 0xe9 at position 13",),
    ),
    BadInput(
        "UTF-16 row",
        GOOD_ROW.encode() + b"\n" + '{"prompt": "a"}'.encode("utf-16"),
        ("rows.jsonl:2: not valid JSON: not UTF-8",),
    ),
    _row("NaN", '{"prompt": "a", "answer": NaN}', "NaN is not a JSON number"),
    _row("infinity", '{"prompt": "a", "answer": -Infinity}', "-Infinity is not a JSON number"),
    _row("endless digits", '{"prompt": "a", "answer": ' + "9" * 5000 + "}", "not valid JSON", "4300 digits"),
    _row("cut off", '{"prompt": "a", "answer": "b', "not valid JSON: Unterminated string"),
    _row("NUL byte", '{"prompt": "a\0", "answer": "b"}', "not valid JSON: Invalid control character"),
    _row("a list", "[1, 2]", "must be a JSON object, not list"),
    _row("nothing but null", "null", "must be a JSON object, not NoneType"),
    _row("no prompt", '{"answer": "1"}', "no key 'prompt' (data.prompt_key)"),
    _row("prompt of a number", '{"prompt": 7, "answer": "1"}', "'prompt' must be text, not int"),
    _row("no answer", '{"prompt": "a"}', "the row has no 'answer' (data.answer_key)", "which the built-in arithmetic"),
    _row("answer is null", '{"prompt": "a", "answer": null}', "the row has no 'answer' (data.answer_key)"),
    _row("answer is a list", '{"prompt": "a", "answer": ["1"]}', "must be text or a number, not list"),
    _row("answer without a number", '{"prompt": "a", "answer": "one"}', "the answer 'one' contains no number"),
]


def _message(name: str, message: str, *says: str) -> BadInput:
    return _row(name, f'{{"prompt": [{{"role": "user", "content": {message}}}], "answer": "1"}}', *says)


MESSAGES = [  # rows.jsonl, with a chat template
    _message("content is null", "null", "a message of 'prompt' has the 'content' None, which is not text"),
    _message("content is a number", "5", "a message of 'prompt' has the 'content' 5, which is not text"),
    _message("content in parts", '[{"type": "text", "text": "a"}]', "supports text content only"),
]

TEMPLATES = [  # tokenizer files
    _text("endless", "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}"
          "{% endfor %}{% endfor %}{% endfor %}", "the chat template of", "did not finish"),
    _text("division by zero", "{{ 1 / 0 }}", "the chat template rejects it: ZeroDivisionError"),
    _text("syntax", "{% for %}", "the chat template rejects it"),
    _text("unknown name", "{{ messages[7].content }}", "the chat template rejects it"),
    _text("calls itself", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "rejects it: RecursionError"),
    _text("long range", "{% for i in range(10 ** 12) %}{% endfor %}", "the chat template rejects it", "Range too big"),
    _text("long text", "{{ messages[0].content * 5000 }}", "the chat template expands it to 20000 bytes"),
    _text("more than the memory", "{{ ([0] * 10 ** 10)|length }}", "the chat template rejects it: MemoryError"),
    _text("surrogate", "{{ '\\ud800' }}", "the chat template rejects it: UnicodeEncodeError"),
    _text("unsafe", "{{ ''.__class__.__mro__ }}", "the chat template rejects it", "unsafe"),
]  # fmt: skip

FUNCTIONS = [  # reward.py
    _text("import error", "import gone\ndef score(p, r, row): return 0.0\n", "failed: ModuleNotFoundError", "(line 1)"),
    _text(
        "division at import", "x = 1\n\ny = 1 / 0\ndef score(p, r, row): return 0.0\n", "ZeroDivisionError", "(line 3)"
    ),
    _text("arity behind a decorator", "import functools\n@functools.cache\ndef score(a, b): return 0.0\n", "must take"),
    _text("ends its process", "import os; os._exit(3)\ndef score(p, r, row): return 0.0\n", "died while loading it"),
]

OVERRIDES = [
    BadInput("override not UTF-8", b"run.name=\xff", ("override run.name=\\udcff", "U+DCFF is not allowed")),
    BadInput("key not UTF-8", b"run.\xff=3", ("override run.\\udcff=3", "expected KEY=VALUE")),
    BadInput("override of NUL", b'run.name="\\0"', ("override run.name=", "U+0000")),
    BadInput("override with a line break", b'run.name="a\\nb"', ("override run.name=", "contains a line break")),
    BadInput("override that is deep", b"run.name=" + b"[" * 3000, ("override run.name=", "more than 50 levels deep")),
    BadInput("override of a long key", b"k" * 5000 + b"=3", ("override kkk", "expected KEY=VALUE")),
    BadInput("override of two lines", b"nonsense\nhere", ("override nonsense\\nhere: expected KEY=VALUE",)),
]
