"""Options in a file: what is none is named, in one line."""

from __future__ import annotations

import pytest

from hf_linattn.errors import OptionError
from hf_linattn.training.arguments import parse_arguments


def test_a_configuration_file_that_is_not_one(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "typo.yaml").write_text("blocksize: 3\n")
    (tmp_path / "twice.yaml").write_text("block_size: 3\nseed: 1\nblock_size: 4\n")
    (tmp_path / "open.yaml").write_text("layers: [1\n")
    expected = {
        "list": "a mapping", "typo": "did you mean block_size", "absent": "cannot be read",
        "twice": "cannot be read: 'block_size' stands there twice", "open": "cannot be read: while parsing",
    }  # fmt: skip
    for name, message in expected.items():
        with pytest.raises(OptionError, match=message) as raised:
            parse_arguments([str(tmp_path / f"{name}.yaml")])
        assert "\n" not in str(raised.value)
