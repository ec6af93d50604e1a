"""JSON at interfaces has no NaN, no infinities, no duplicate keys and no unpaired surrogates, in either direction."""

from __future__ import annotations

import json
import math
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from mrl import strict_json
from mrl.agents.environments import OpenEnvError, _asked
from mrl.config.json_rows import parse_row
from mrl.config.schema import DataConfig, SourceConfig
from mrl.data.columns import read_template_variables
from mrl.observe.files import append_jsonl, read_jsonl, write_jsonl

REFUSED = {
    '{"a": NaN}': "NaN is not a JSON number",
    "[-Infinity]": "-Infinity is not a JSON number",
    '{"a": [1e999]}': "1e999 is larger than any float",
    "-1E+400": "larger than any float",
    '{"a": 1, "b": {"c": 1, "c": 2}}': "'c' occurs twice",
    '["\\ud83d"]': "half of a character",
    "[" * 100_000: "nested too deeply",
    "1 2": "extra text '2'",
    "1_000": "extra text '_000'",
    "": "Expecting value",
    "9" * 5000: "digits",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:12])
def test_what_is_no_json_is_refused_in_one_sentence(text: str) -> None:
    for given in (text, text.encode()):
        with pytest.raises(ValueError, match=REFUSED[text]) as caught:
            strict_json.loads(given)
        assert "\n" not in str(caught.value)


def test_what_is_json_is_read() -> None:
    text = ' {"a": [1, -2.5e3, true, null, "\\ud83d\\ude00"]}\n'
    assert strict_json.loads(text) == strict_json.loads(text.encode()) == json.loads(text)
    assert strict_json.raw_decode('x {"a": 1} y', 2) == ({"a": 1}, 10)
    with pytest.raises(ValueError, match="not UTF-8: byte 0xff at position 2"):
        strict_json.loads(b'"\xff"')
    with pytest.raises(ValueError, match="not JSON compliant"):
        strict_json.dumps({"a": [math.inf]})


@pytest.mark.parametrize("text", ['{"prompt": "a", "n": 1e999}', '{"prompt": "a", "prompt": "b"}', '{"prompt": NaN}'])
def test_rows_of_the_data(text: str) -> None:
    with pytest.raises(ValueError, match="not valid JSON: "):
        parse_row(text.encode())


def test_tools_of_a_row() -> None:
    with pytest.raises(ValueError, match="'tools' is text, but not JSON .1e999 is larger"):
        read_template_variables({"tools": '[{"maximum": 1e999}]'}, DataConfig(train=(SourceConfig(path="a.jsonl"),)))


def test_files_of_a_run(tmp_path: Path) -> None:
    """Files of a run replace non-finite numbers, which rows of a Parquet file may contain, by strings."""
    file = tmp_path / "rows.jsonl"
    row = {"row": {"price": math.nan, "many": [1.0, -math.inf]}, "score": 1.0}
    write_jsonl(file, [row])
    append_jsonl(file, row)
    expected = {"row": {"price": "nan", "many": [1.0, "-inf"]}, "score": 1.0}
    assert [strict_json.loads(line) for line in file.read_bytes().splitlines()] == [expected] * 2
    assert read_jsonl(file) == [expected] * 2


def test_an_environment_s_server() -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"observation": 1, "reward": NaN}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(OpenEnvError, match="/step did not return JSON: NaN is not a JSON number"):
            _asked(url, "POST", "/step", {"action": 1})
        with pytest.raises(ValueError, match="not JSON compliant"):
            _asked(url, "POST", "/step", {"action": math.nan})
        server.shutdown()
