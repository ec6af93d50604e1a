"""Measures the peak memory of the loss head, forward and backward, beyond its inputs, with a large vocabulary.

    python tools/bench/head_memory.py [--trl-python TRL/bin/python]

Each implementation runs in its own process with one thread. The result is the peak resident memory (VmHWM) after the
loss and its gradients, minus the resident memory (VmRSS) with the inputs and after a small call. All results include
dW, the gradient of the output matrix. TRL's implementation is measured if --trl-python is given.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from tools.bench import record  # noqa: E402

VOCABULARY = 151_936
SHAPES = ((1024, 256), (2048, 256), (1024, 896))  # rows, hidden
NAIVE, TRL = "log_softmax of all logits", "TRL's selective_log_softmax_and_entropy"
FORMS = ("mrl, gradients formed in the forward", "mrl, logits computed again", NAIVE)
DTYPES = ("float32", "bfloat16")
LIMIT_S = 900.0


def log_probs(form: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns log-probs, and entropies without a gradient."""
    if form.startswith("mrl"):
        from mrl.kernels.linear_logprob import LossGradients, linear_log_prob

        loss_gradients = LossGradients(lambda log_probs, entropies, rows: (torch.ones_like(log_probs), None))
        given = loss_gradients if "formed" in form else None
        return linear_log_prob(hidden, weight, labels, 1.0, 0, weight.size(0), loss_gradients=given)[:2]
    logits = hidden @ weight.T
    if form == TRL:
        from trl.trainer.utils import selective_log_softmax_and_entropy

        log_p, entropy = selective_log_softmax_and_entropy(logits[None], labels[None])
        return log_p[0], entropy[0]
    log_p = logits.float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, labels[:, None])[:, 0], entropy


def child(form: str, dtype: str, rows: int, width: int) -> None:
    torch.set_num_threads(1)
    hidden = torch.randn(rows, width).to(getattr(torch, dtype)).requires_grad_()
    weight = (torch.randn(VOCABULARY, width) * 0.02).to(hidden.dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (rows,))
    small = hidden[:8].detach().requires_grad_(), weight[:64].detach().requires_grad_()
    torch.autograd.grad(log_probs(form, *small, labels[:8] % 64)[0].sum(), small)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = memory_bytes("VmRSS")
    gradients = torch.autograd.grad(log_probs(form, hidden, weight, labels)[0].sum(), (hidden, weight))
    print(json.dumps({"beyond_inputs_mb": (memory_bytes("VmHWM") - before) / 1e6, "dW_mb": gradients[1].nbytes / 1e6}))


def memory_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


def run_child(python: str, form: str, *shape: str) -> dict[str, float]:
    command = [python, __file__, "--child", form, *shape]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        sys.exit(f"{form} failed: {done.stderr[-3000:]}")
    numbers: dict[str, float] = json.loads(done.stdout)
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter of an environment with TRL and torch")
    args = parser.parse_args()
    pythons = dict.fromkeys(FORMS, sys.executable) | ({TRL: args.trl_python} if args.trl_python else {})
    forms: dict[str, dict[str, dict[str, float]]] = {}
    for rows, width in SHAPES:
        for dtype in DTYPES:
            name = f"{rows} rows, hidden {width}, {dtype}"
            results = {form: run_child(python, form, dtype, str(rows), str(width)) for form, python in pythons.items()}
            naive = results[NAIVE]["beyond_inputs_mb"]
            print(f"\n{name}", flush=True)
            for form, numbers in results.items():
                numbers["of_log_softmax"] = round(naive / numbers["beyond_inputs_mb"], 2)
                print(f"  {form:42}{numbers['beyond_inputs_mb']:8.0f} MB, of which dW {numbers['dW_mb']:.0f}"
                      f"{numbers['of_log_softmax']:8.2f} times less")  # fmt: skip
            forms[name] = results
    record.write(record.RESULTS / "head_memory.json", {"vocabulary": VOCABULARY, "shapes": forms})


if __name__ == "__main__":
    form, dtype, rows, width = sys.argv[2:] if sys.argv[1:2] == ["--child"] else ("", "", "0", "0")
    child(form, dtype, int(rows), int(width)) if form else main()
