r"""Final answers and programs in a model's response. Standard library only: reward workers start quickly.

Thoughts and tool output never hold the answer: they are removed first (`visible_text`). In the rest the last \boxed{}
or \fbox{} counts, else the last line `#### 42`, else the last readable "the answer is ...", else whatever the reader
finds in the text (`final_answers`). Programs are taken from fenced blocks (`program`).
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mrl.reward.python_text import bound_in, parse

_TAG = re.compile(
    r"(?i)<(?P<xml>/?(?:think|thinking|thought|reasoning|tool_call|tool_response))>"
    r"|\[(?P<square>/?THINK)\]|◁(?P<triangle>/?think)▷"
)
_HARMONY_FINAL = "<|channel|>final<|message|>"  # gpt-oss: channels before this one are thoughts and tool calls
_END_TOKENS = re.compile(r"(?:\s*(?:<\|[^<>|\s]{1,40}\|>|</s>|<end_of_turn>|<eos>))+\s*$")
_ANSWER_TAG = re.compile(r"(?is)<answer>(.*?)(?:</answer>|\Z)")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_SPACE_OR_DOLLAR = re.compile(r"[\s$]|\Z")
_BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:\\text\{\s*)?(?:\b(?:and|or)\b)?(?:\s*\})?[\s$]*")
_HASHES = re.compile(r"(?m)^[ \t>*]*#{4}(?![ \t]*\d+[.)][ \t]+\S)[ \t]*(?=[\W_]*[\d\\])(?!#)(.+)$")
_SAID = re.compile(
    r"""(?ix) (?: \banswer (?:\** \s+ (?:to|of|for) \b [^.:\n]{0,80}? )? [*_]* (?: \s+ (?:is|are|was|would\ be|equals)\b
          | \s*[:=：] | [*_]*\s*$ )
      | \b (?:réponse|respuesta|resposta|risposta|antwort) (?:\s+ \w+)? (?: \s+ (?:est|es|é|è|ist)\b | \s*[:：] )
      | \bответ (?: \s*[:：—-] | \s+\w+\s*[:：] ) | (?:答案|答え|정답|答) (?:是|为|為|は|은|[:：])+
    ) [\s*_:：]* (?!not\b|nicht\b|pas\b)""",
    re.MULTILINE,
)
_SENTENCE_END = re.compile(r"[.!?]+(?=[\s*_]|$)|[。！？\n]")
_MATHS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))

_FENCE = re.compile(
    r"^(?P<before>[ \t]*(?:>[ \t]?)*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)$"
)
_FENCE_AFTER_TEXT = re.compile(r"^(?P<before>.*?)(?P<fence>`{3,})(?P<info>(?i:python3?|py))[ \t]*$")
_PYTHON = ("py", "python", "python3", "py3")
_WORDS = ("", "latex", "tex", "math", "text", "txt", "plaintext", "markdown", "md")  # blocks that may hold an answer
MAX_STRING_CHECKS = 50
MAX_PHRASE = 1000  # characters of an answer in a sentence
MAX_SAID = 20  # number of last sentences to examine


def visible_text(response: str) -> str:
    """Returns the response without thoughts, tool calls and their results.

    An unclosed thought reaches to the end, so nothing after it is an answer; a closing tag without an opening one ends
    a thought that the prompt has opened. If there is an <answer> with content, only the last one counts.
    """
    text = _END_TOKENS.sub("", response.replace("\r\n", "\n"))
    text = text.rpartition(_HARMONY_FINAL)[2]
    kept: list[str] = []
    at, opened = 0, ""
    for tag in _TAG.finditer(text):
        name = (tag["xml"] or tag["square"] or tag["triangle"]).lower()
        before, after = text[max(0, tag.start() - 1) : tag.start()], text[tag.end() : tag.end() + 1]
        quoted = before == after and before in ("`", "'", '"')
        if quoted or (not opened and name in ("/tool_call", "/tool_response")):
            continue  # a quoted tag, or the end of a call without opening tag
        if not opened:
            kept = [] if name[0] == "/" else [*kept, text[at : tag.start()]]
            opened = "" if name[0] == "/" else name
        elif name == f"/{opened}":
            opened = ""
        else:
            continue
        at = tag.end()
    if not opened:
        kept.append(text[at:])
    text = _END_TOKENS.sub("", "".join(kept))
    answers = [content for content in _ANSWER_TAG.findall(text) if content.strip()]
    return answers[-1] if answers else text


class FinalAnswer(NamedTuple):
    """Text that may hold the answer. is_marked: the text is the answer; otherwise the answer is somewhere in it."""

    text: str
    is_marked: bool = True


def final_answers(response: str) -> Iterator[FinalAnswer]:
    """Yields the final answers of a response, by priority; a reader takes the first that it can read.

    A box or a `####` line is the only answer: a marked answer that cannot be read is no answer. Otherwise the last
    sentences of "the answer is" come first, then the whole text.
    """
    blocks = _parts(visible_text(response))  # without fences, programs and their output
    text = "\n".join(line for block in blocks if not block.fenced or block.language in _WORDS for line in block.lines)
    found = boxed_answer(text)
    if found is not None:
        yield FinalAnswer(found)
    elif marked := hash_marked_answer(text):
        yield FinalAnswer(marked)
    else:
        for said in reversed(list(_SAID.finditer(text))[-MAX_SAID:]):
            if phrase := _phrase(text[said.end() : said.end() + MAX_PHRASE]):
                yield FinalAnswer(phrase)
        yield FinalAnswer(text, is_marked=False)


def hash_marked_answer(text: str) -> str:
    """Returns the last line `#### 42` without its marks, "" if there is none. A heading of this level is not one."""
    found = _HASHES.findall(text)
    return found[-1].strip() if found else ""


def boxed_answer(text: str) -> str | None:
    r"""Returns the content of the last nonempty box; of consecutive boxes ("\boxed{2} and \boxed{3}") all, joined by
    commas. Returns None if there is no box; "" if the last one is not closed, as in a truncated response.
    """
    boxes: list[tuple[int, int, str]] = []  # (start, end, content)
    for match in _BOX.finditer(text):
        if boxes and match.start() < boxes[-1][1]:
            continue  # inside the one before
        start = match.end()
        if text[start : start + 1] == "[":  # \framebox[width]
            start = text.find("]", start) + 1
        if text[start : start + 1] == "{":
            end = _closing_brace(text, start)
            content = None if end is None else text[start + 1 : end]
        else:
            end = next(_SPACE_OR_DOLLAR.finditer(text, start)).start()
            content, end = text[start:end].rstrip(".,;"), end - 1
        if content is None or end is None:
            return ""
        if content := _BOX.sub("", content).strip():  # boxes in it
            boxes.append((match.start(), end + 1, content))
    if not boxes:
        return None
    first = len(boxes) - 1
    while first and (between := text[boxes[first - 1][1] : boxes[first][0]]) and _BETWEEN_BOXES.fullmatch(between):
        first -= 1
    return ", ".join(content for _, _, content in boxes[first:])


def _closing_brace(text: str, start: int) -> int | None:
    depth = 0
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        if match[0] in "{}":
            depth += 1 if match[0] == "{" else -1
            if depth == 0:
                return match.start()
    return None


def _phrase(text: str) -> str:
    """Returns the sentence that `text` begins with, or the formula, if it begins with one."""
    for opening, closing in _MATHS:
        if text.startswith(opening):
            end = text.find(closing, len(opening))
            if end >= 0 and "\n\n" not in text[:end] and not (opening == "$" and re.match(r"\d", text[end + 1 :])):
                return text[len(opening) : end].strip()
    sentence = _SENTENCE_END.search(text)
    return (text if sentence is None else text[: sentence.start()]).strip().strip("*_").strip()


# programs


@dataclass
class TextBlock:
    """Lines of a response: those of a fenced block, without its indentation, or those between such blocks."""

    fenced: bool = False
    language: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The block's lines, dedented."""
        return textwrap.dedent("\n".join(self.lines))


def program(response: str, names: Collection[str] = ()) -> str:
    """Returns the program of a response that is asked to define `names`.

    Candidates are the fenced blocks named Python, else those without a name. The last of those that define most of
    `names` wins; among equals, blocks that are Python and do more than state a value are preferred. Without a fenced
    block the program is the whole response without thoughts.
    """
    text = visible_text(response)
    blocks = [block for block in _parts(text) if block.fenced]
    for candidates in ([b for b in blocks if b.language in _PYTHON], [b for b in blocks if not b.language]):
        if candidates:  # `max` takes the first of equals
            return max((block.text for block in reversed(candidates)), key=lambda text: _fitness(text, names))
    return text.strip("\n")


def _fitness(text: str, names: Collection[str]) -> tuple[int, bool]:
    """Returns how many of `names` the text defines, and whether it is Python that does more than state a value."""
    try:
        tree = parse(text)
    except ValueError:
        return 0, False
    does = any(isinstance(node, ast.Call) for node in ast.walk(tree)) or not all(
        isinstance(node, ast.Expr) for node in tree.body
    )
    return len(set(names) & {name for node in tree.body for name in bound_in(node)}), does


def _parts(text: str) -> list[TextBlock]:
    """Splits a response as Markdown does, line by line, into fenced blocks and the text between them.

    A fence in a triple-quoted string of a Python block does not close it. A block without a closing fence ends where
    another named one begins, or with the text.
    """
    parts, opening, prefix = [TextBlock()], "", ""
    lines, checks, first_close = text.split("\n"), 0, None
    number = 0
    while number < len(lines):
        line, number = lines[number], number + 1
        fence = _FENCE.match(line) or (None if opening else _FENCE_AFTER_TEXT.match(line))
        block, in_string = parts[-1], False
        if opening and fence and not fence["fence"].startswith(opening):
            fence = None  # of another kind, or shorter: a line of the block
        elif opening and fence and block.language in ("", *_PYTHON) and checks < MAX_STRING_CHECKS:
            checks, in_string = checks + 1, _ends_in_string(block.text)
        if in_string:
            first_close = first_close or (number, len(block.lines))
        if fence is None or in_string:
            block.lines.append(_unindented(line, prefix) if opening else line)
        elif not opening or fence["info"].strip():  # a block begins; another one before it was not closed
            opening, prefix, first_close = fence["fence"], fence["before"], None
            parts.append(TextBlock(True, _language(fence["info"])))
        else:
            opening = ""
            parts.append(TextBlock())
        if number == len(lines) and opening and first_close and _ends_in_string(parts[-1].text):
            number, kept = first_close  # the string is never closed, so the fence was
            parts[-1].lines[kept:] = []
            opening, first_close = "", None
            parts.append(TextBlock())
    return parts


def _ends_in_string(text: str) -> bool:
    """Returns True if Python text ends inside a triple-quoted string."""
    try:
        parse(text)
    except ValueError as error:
        return "unterminated triple-quoted string" in str(error)
    return False


def _language(info: str) -> str:
    """Returns the language in ``` python title="x"```, ```{.python}```."""
    found = re.search(r"[\w+#-]+(?:\.\w+)*", info)
    word = found[0].lower() if found else ""
    return "python" if word.endswith(".py") else word


def _unindented(line: str, prefix: str) -> str:
    """Removes the prefix of the block's fence from a line: marks of a quotation, indentation."""
    for _ in range(prefix.count(">")):
        line = re.sub(r"^[ \t]*> ?", "", line)
    width = 0 if ">" in prefix else len(prefix)
    return line[min(width, len(line) - len(line.lstrip())) :]
