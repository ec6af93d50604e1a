"""Texts with tool calls: the calls that mrl's parsers find, and whether SGLang's parser finds the same."""

from __future__ import annotations

from typing import Any, NamedTuple

from mrl.agents.tool_call_parsers import ToolCall

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {"type": "string"},
                    "n": {"type": "integer"},
                    "deep": {"type": "boolean"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "items": {"type": "array", "items": {"type": "integer"}},
                    "place": {"$ref": "#/$defs/Place"},
                },
                "$defs": {"Place": {"type": "object", "properties": {"city": {"type": "string"}}}},
            },
        },
    },
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},
]


class Text(NamedTuple):
    """error: pattern of the message for the model, empty if there is none; same: True if SGLang finds the same calls"""

    parser: str
    text: str
    calls: tuple[ToolCall, ...]
    error: str = ""
    same: bool = True


def hermes(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


def qwen(*parameters: str, name: str = "run") -> str:
    return f"<tool_call>\n<function={name}>\n" + "".join(parameters) + "</function>\n</tool_call>"


def given(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def glm(name: str, **arguments: str) -> str:
    pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def deepseek(*calls: str) -> str:
    inner = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def v3(name: str, arguments: str) -> str:
    return f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"


def v31(name: str, arguments: str) -> str:
    return f"{name}<｜tool▁sep｜>{arguments}"


def kimi(*calls: tuple[str, str]) -> str:
    inner = "".join(f"<|tool_call_begin|>{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>" for i, a in calls)
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def harmony(to: str, arguments: str) -> str:
    return f"<|start|>assistant<|channel|>commentary to={to} <|constrain|>json<|message|>{arguments}<|call|>"


def run(**arguments: Any) -> ToolCall:
    return ToolCall("run", arguments)


LOOK, NONE = ToolCall("look"), ()
TEXTS = [
    Text("hermes", "2 + 2 is 4", NONE),
    Text("hermes", "a " + hermes('{"name": "run", "arguments": {"n": 1}}') + " b", (run(n=1),)),
    Text("hermes", hermes('{"name": "look", "arguments": {}}') * 2, (LOOK, LOOK)),
    Text("hermes", hermes('{"name": "look"}'), (LOOK,)),
    Text(
        "hermes",
        hermes('{"name": "run", "arguments": {"code": "</tool_call>"}}'),
        (run(code="</tool_call>"),),
        same=False,
    ),
    Text(
        "hermes",
        hermes('{"name": "look"}') + hermes('{"name": "run", "arguments": {"n" 1}}'),
        (LOOK,),
        "line 4, column 35: .*':' delim",
        False,
    ),
    Text(
        "hermes",
        hermes('{"name": "look"}').removesuffix("</tool_call>") + hermes('{"name": "look"}'),
        (LOOK,),
        "line 3, column 1: expected </tool_call>",
        False,
    ),
    Text("hermes", hermes('{"name": "run", "arguments": {"n": NaN}}'), NONE, "NaN is not a JSON number", False),
    Text("hermes", hermes('{"name": "run", "arguments": {"n": 1e999}}'), NONE, "larger than any float", False),
    Text("hermes", hermes('{"name": "run", "arguments": {"n": 1, "n": 2}}'), NONE, "'n' occurs twice", False),
    Text("hermes", hermes('{"name": "run", "arguments": {"code": "\\ud83d"}}'), NONE, "half of a character", False),
    Text("hermes", hermes('{"name": "look"} and more'), NONE, "expected </tool_call>, found 'and more"),
    Text("hermes", hermes('{"name": "look", "parameters": {"a": 1}}'), NONE, "not 'parameters'", False),
    Text("hermes", hermes('{"name": "other"}'), (ToolCall("other"),), same=False),
    Text("hermes", '<tool_call>{"name": "look"}', NONE, "expected </tool_call>, found the end of the turn", False),
    Text("hermes", '{"name": "look"}</tool_call>', NONE, "stands outside of a call"),
    Text("hermes", hermes('{"name": 3}'), NONE, '"name" must be'),
    Text("hermes", hermes('["look"]'), NONE, "must be a JSON object"),
    Text("hermes", hermes('{"name": "look", "arguments": [1]}'), NONE, '"arguments" must be a JSON object', False),
    Text("hermes", hermes("[" * 100_000), NONE, "nested too deeply"),
    Text("hermes", hermes('{"name": "run", "arguments": "{\\"n\\": 1}"}'), (run(n=1),), same=False),
    Text(
        "hermes", "<think>" + hermes('{"name": "run"}') + "</think>" + hermes('{"name": "look"}'), (LOOK,), same=False
    ),
    Text("hermes", hermes('{"name": "run"}') + "</think>" + hermes('{"name": "look"}'), (LOOK,), same=False),
    Text("hermes", hermes('{"name": "run", "arguments": {"code": "</think>"}}'), (run(code="</think>"),)),
    Text("qwen3_coder", qwen(given("code", "print(1)\nx"), given("n", "3")), (run(code="print(1)\nx", n=3),)),
    Text("qwen3_coder", qwen(given("code", "1_000")), (run(code="1_000"),)),
    Text("qwen3_coder", qwen(given("code", "0x10")), (run(code="0x10"),)),
    Text("qwen3_coder", qwen(given("code", "2024.10")), (run(code="2024.10"),)),
    Text("qwen3_coder", qwen(given("code", "None")), (run(code="None"),)),
    Text("qwen3_coder", qwen(given("code", "null")), (run(code="null"),), same=False),
    Text("qwen3_coder", qwen(given("maybe", "null")), (run(maybe=None),)),
    Text("qwen3_coder", qwen(given("maybe", "7")), (run(maybe="7"),)),
    Text("qwen3_coder", qwen(given("deep", "True")), (run(deep=True),)),
    Text("qwen3_coder", qwen(given("deep", "perhaps")), NONE, "'perhaps' is not JSON of type boolean", False),
    Text("qwen3_coder", qwen(given("n", "1_000")), NONE, "'n' of 'run': '1_000' is not JSON of type integer", False),
    Text("qwen3_coder", qwen(given("n", "2.5")), NONE, "'2.5' is of type number, expected integer", False),
    Text("qwen3_coder", qwen(given("n", "2.0")), (run(n=2),), same=False),
    Text("qwen3_coder", qwen(given("items", "[1, 2]")), (run(items=[1, 2]),)),
    Text("qwen3_coder", qwen(given("items", "(1, 2)")), NONE, "is not JSON of type array", False),
    Text("qwen3_coder", qwen(given("items", "[1e999]")), NONE, "is not JSON of type array: 1e999 is larger", False),
    Text("qwen3_coder", qwen(given("place", '{"city": "Bern"}')), (run(place={"city": "Bern"}),), same=False),
    Text("qwen3_coder", qwen(given("other", "7")), (run(other="7"),)),
    Text(
        "qwen3_coder",
        qwen("<parameter=code>\n1\n" + given("n", "3")),
        NONE,
        "line 5, column 1: expected </parameter> before <parameter=",
        False,
    ),
    Text("qwen3_coder", qwen("<parameter=code>\n1"), NONE, "</parameter> is missing", False),
    Text("qwen3_coder", qwen(given("code", "a</parameter>b")), NONE, "cannot hold </parameter>", False),
    Text("qwen3_coder", qwen(given("code", "</function>")), (run(code="</function>"),), same=False),
    Text("qwen3_coder", qwen(given("n", "1"), "stray"), NONE, "found 'stray", False),
    Text("qwen3_coder", qwen(given("n", "1"), given("n", "2")), NONE, "'n' is there twice", False),
    Text("qwen3_coder", qwen("</function><function=look>"), NONE, "expected </tool_call>, found '<function=", False),
    Text("qwen3_coder", hermes('{"name": "look"}'), NONE, "expected <function="),
    Text("qwen3_coder", "<function=look>\n</function>\n</tool_call>", NONE, "<function= stands outside of a call"),
    Text("qwen3_coder", qwen(given("n", "x")) + qwen(name="look"), (LOOK,), "'x' is not JSON of type integer", False),
    Text("glm45", glm("run", code="1", n="3"), (run(code="1", n=3),)),
    Text("glm45", glm("run", code="2024.10"), (run(code="2024.10"),), same=False),
    Text("glm45", glm("run", code="a\nb"), (run(code="a\nb"),)),
    Text("glm45", glm("look") + glm("run", n="3"), (LOOK, run(n=3))),
    Text("glm45", "<tool_call>look</tool_call>", (LOOK,), same=False),
    Text("glm45", "<tool_call>run<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>", (run(n=3),), same=False),
    Text("glm45", glm("run", n="three"), NONE, "'three' is not JSON of type integer", False),
    Text(
        "glm45", "<tool_call>run\n<arg_key>n</arg_key>\n3\n</tool_call>", NONE, "expected <arg_value>, found '3", False
    ),
    Text("glm45", "<tool_call>\n<arg_key>n</arg_key>\n</tool_call>", NONE, "begins with the name of a tool"),
    Text("glm45", glm("look") + "<arg_key>n</arg_key>", (LOOK,), "<arg_key> stands outside of a call"),
    Text("deepseek_v3", "x" + deepseek(v3("run", '{"n": 1}'), v3("look", "{}")), (run(n=1), LOOK)),
    Text("deepseek_v3", deepseek(v3("run", '{"code": "\\n```\\n"}')), (run(code="\n```\n"),)),
    Text("deepseek_v3", deepseek(v3("run", '{"n": 1'), v3("look", "{}")), (LOOK,), "Expecting ',' delimiter", False),
    Text("deepseek_v31", deepseek(v31("run", '{"n": 1}'), v31("look", "{}")), (run(n=1), LOOK)),
    Text(
        "deepseek_v31",
        deepseek(v31("run", '{"code": "<｜tool▁call▁end｜>"}')),
        (run(code="<｜tool▁call▁end｜>"),),
        same=False,
    ),
    Text(
        "deepseek_v31",
        deepseek(v31("look", "{}")).removesuffix("<｜tool▁calls▁end｜>"),
        (LOOK,),
        "<｜tool▁calls▁end｜> is missing",
    ),
    Text("deepseek_v31", deepseek(v31("look", "{}") + "<｜tool▁call▁end｜>x"), (LOOK,), "'x' stands between calls"),
    Text("kimi_k2", kimi(("functions.run:0", '{"n": 1}'), ("functions.look:1", "{}")), (run(n=1), LOOK)),
    Text("kimi_k2", kimi(("3", '{"n": 1}')), NONE, "begins with functions.NAME:NUMBER", False),
    Text(
        "kimi_k2", kimi(("functions.run:0", '{"n": }'), ("functions.look:1", "{}")), (LOOK,), "Expecting value", False
    ),
    Text("gpt_oss", harmony("functions.run", '{"n": 1}'), (run(n=1),)),
    Text("gpt_oss", "<|channel|>analysis<|message|>to=functions.x<|end|>" + harmony("functions.look", "{}"), (LOOK,)),
    Text(
        "gpt_oss",
        '<|start|>assistant to=functions.run<|channel|>commentary json<|message|>{"n": 1}',
        (run(n=1),),
        same=False,
    ),
    Text("gpt_oss", harmony("functions.run", '{"n": 1'), NONE, "Expecting ',' delimiter"),
    Text("gpt_oss", harmony("python", "{}"), NONE, "to=functions.NAME, not to=python"),
    Text("gpt_oss", "<|channel|>final<|message|>hello", NONE),
]
