"""Files of JSON that are damaged, by whatever reads them."""

from __future__ import annotations

import pytest
import torch

from hf_linattn.adapter_config import read_adapter_config
from hf_linattn.cli.push import check_converted, named_files
from hf_linattn.errors import CheckpointError
from hf_linattn.report.card import patches_in
from hf_linattn.saving import is_marked
from hf_linattn.training.adapter_files import load_adapter
from hf_linattn.training.checkpoints import weight_faults
from hf_linattn.training.pretraining.kept import same_run_or_new
from hf_linattn.training.run_directory import RunDirectory

DAMAGED = {
    "empty": b"", "cut": b'{"a', "list": b"[]", "null": b"null", "number": b"3", "other encoding": b'{"a": "\xfc"}',
}  # fmt: skip
READERS = {
    "adapter_config.json": [read_adapter_config, lambda folder: load_adapter(torch.nn.Identity(), folder)],
    "config.json": [check_converted, patches_in],
    "run.json": [lambda folder: same_run_or_new(folder, {})],
    "stages/speed.json": [lambda folder: RunDirectory(folder, None).finished("speed")],
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("name", READERS)
def test_whatever_reads_a_damaged_file_names_it_and_a_remedy(tmp_path, name, content):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    for read in READERS[name]:
        with pytest.raises(CheckpointError, match=rf"^'{file}' is damaged \(.*\); (save|give|delete) "):
            read(tmp_path)


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_config_marks_no_folder(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    assert not is_marked(tmp_path)


@pytest.mark.parametrize("content", [*DAMAGED.values(), b"{}", b'{"weight_map": []}'])
def test_a_damaged_index_is_a_fault_of_its_checkpoint(tmp_path, content):
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content)
    assert list(weight_faults(tmp_path)) == [f"{index.name} is damaged"]


def test_a_card_in_another_encoding_is_named(tmp_path):
    (tmp_path / "README.md").write_bytes("für mich".encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"cannot be read: 'utf-8' codec .*; save its README\.md as UTF-8"):
        named_files(tmp_path, "me/model")
