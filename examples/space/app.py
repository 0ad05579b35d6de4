"""The original and a converted model side by side: what they write, how fast, and with how many bytes of state.

    pip install -c constraints.txt ".[demo]"
    python examples/space/app.py                                   # a small model of this repository
    python examples/space/app.py --model HuggingFaceTB/SmolLM2-135M-Instruct

The environment variable MODEL names a model, too, as the settings of a Space do.
"""

from __future__ import annotations

import argparse
import copy
import os
import threading
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from hf_linattn import HfLinattnError, calibrate, is_patched, patch_model, unpatch_model
from hf_linattn.cache import state_bytes
from hf_linattn.errors import OptionError
from hf_linattn.evaluation import position_limit
from hf_linattn.evaluation.recall.haystacks import bundled_words
from hf_linattn.mechanism_table import rows
from hf_linattn.reading import read_tokenizer, reading

BUNDLED = Path(__file__).resolve().parents[2] / "recipes" / "pretrained" / "llama"
FIRST = ("hybrid", "streaming", "local")  # those that write well untrained
LONGEST, MOST_TOKENS, FIT_STEPS = 16384, 256, 5
REMEDY = "give --model, or the environment variable MODEL, a folder with a causal model or a name on the Hub"
SIDES = ("original", "converted")
Update = tuple[str, str, str, str, str]  # what the page says; text and numbers of both models

INTRODUCTION = """# Softmax attention, and what replaces it
Both models have the same weights. They read the same context and write after it, one after the other, so that neither
slows the other down. The cache of softmax grows with every token, the state of the converted model does not. `hybrid`,
`streaming` and `local` write well as they are. The others need a fit, and most of them training, before they do."""


class Streamer(TextIteratorStreamer):
    """Text as it is written, with the number of tokens so far and the times of the first and the last."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.count, self.first, self.last = -1, 0.0, 0.0  # the prompt comes as one

    def put(self, value: torch.Tensor) -> None:
        self.count, self.last = self.count + 1, time.perf_counter()
        if self.count == 1:
            self.first = self.last
        super().put(value)


class Ended(StoppingCriteria):
    """Ends a generation that nobody waits for any more."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full(input_ids.shape[:1], self.event.is_set(), device=input_ids.device)


class Pair:
    """A causal model and its converted copy, which has the same weights."""

    def __init__(self, name: str):
        with reading("model", name, REMEDY):
            self.original: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name)
        if is_patched(self.original):
            raise OptionError(f"model={name!r} is converted already; give the original, which this page converts")
        self.tokenizer = read_tokenizer("model", name)
        self.original.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        shared = {id(x): x for x in self.original.parameters()}
        self.converted = copy.deepcopy(self.original, shared)
        self.made: tuple[str, bool, str] | None = None
        positions = getattr(self.original.config, "max_position_embeddings", LONGEST)
        self.longest = min(position_limit(self.original) or positions, positions, LONGEST) - MOST_TOKENS

    def convert(self, mechanism: str, fit: bool, text: str) -> None:
        """Have the copy use a mechanism, fitted to the original on a text or not; nothing where it does already."""
        wanted = (mechanism, fit, text if fit else "")
        if self.made == wanted:
            return
        if is_patched(self.converted):
            unpatch_model(self.converted)
        self.made = None
        patch_model(self.converted, mechanism)
        if fit:
            calibrate(self.converted, [text], tokenizer=self.tokenizer, steps=FIT_STEPS)
        self.made = wanted

    def first_ids(self, prompt: str) -> list[int]:
        """Return what the tokenizer puts before a text: without it some models write rubbish."""
        return list(takewhile(set(self.tokenizer.all_special_ids).__contains__, self.tokenizer(prompt)["input_ids"]))

    def inputs(self, prompt: str, length: int, text: str) -> torch.Tensor:
        """Return ids [1, length] that begin with the text, again and again, and end with the prompt."""
        if not prompt.strip():
            raise OptionError("prompt is empty; write something for the models to go on from")
        own = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        first = [] if self.tokenizer.chat_template else self.first_ids(prompt)
        room = length - len(first) - len(own)
        if room < 0:
            raise OptionError(
                f"prompt has {len(first) + len(own)} tokens, more than the {length} of the context; move the slider to"
                " the right, or write a shorter one"
            )
        words = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        before = (words * (room // max(len(words), 1) + 1))[:room]
        if self.tokenizer.chat_template is None:
            return torch.tensor([first + before + own], device=self.original.device)
        content = f"{self.tokenizer.decode(before)}\n\n{prompt}"
        message = [{"role": "user", "content": content}]
        made = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt")
        return (made if isinstance(made, torch.Tensor) else made["input_ids"]).to(self.original.device)


def write(model: PreTrainedModel, tokenizer: Any, ids: torch.Tensor, tokens: int) -> Iterator[tuple[str, str]]:
    """Yield the text so far and what it took, while a model writes `tokens` tokens."""
    streamer, cache = Streamer(tokenizer), DynamicCache(config=model.config)
    failed: list[BaseException] = []
    ended = Ended()
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "streamer": streamer}
    options["stopping_criteria"] = StoppingCriteriaList([ended])

    def run() -> None:
        try:
            model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
        except Exception as error:  # raised again in the thread of the page
            failed.append(error)
        finally:
            streamer.end()

    start = time.perf_counter()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    text = ""
    try:
        for piece in streamer:
            text += piece
            yield text, numbers(ids.shape[1], start, streamer, cache)
    finally:  # also where the visitor has left: the next one's times must be of a machine that is free
        ended.event.set()
        thread.join()
    if failed:
        raise failed[0]
    yield text, numbers(ids.shape[1], start, streamer, cache)


def numbers(length: int, start: float, streamer: Streamer, cache: DynamicCache) -> str:
    """Return what is shown below a text."""
    if streamer.count < 1:
        return f"reading {length:,} tokens"
    seconds, since = streamer.first - start, streamer.last - streamer.first
    speed = f"{(streamer.count - 1) / since:,.1f} tokens/s" if streamer.count > 1 else "first token"
    return (
        f"**{speed}**, state **{state_bytes(cache):,} bytes**; {length:,} tokens read in {seconds:.2f} s"
        f" ({length / seconds:,.0f} tokens/s), {streamer.count} written"
    )


def choices() -> list[tuple[str, str]]:
    """Return (label, name) of the causal mechanisms whose state does not grow; first those that need no training."""
    useful = [row for row in rows() if row["constant_state"] and "causal" in row["modes"]]
    useful = [row for row in useful if row["family"] != "composite"]
    ordered = sorted(useful, key=lambda row: (row["name"] not in FIRST, row["name"]))
    return [(f"{row['name']}: {row['summary']}", row["name"]) for row in ordered]


def page_of(name: str) -> gr.Blocks:
    """Return the page for a model; what cannot be loaded is said on the page, with what to do about it."""
    try:
        pair = Pair(name)
    except HfLinattnError as error:
        with gr.Blocks(title="hf_linattn") as page:
            gr.Markdown(f"{INTRODUCTION}\n\n**{error}**")
        return page

    def talk(prompt: str, mechanism: str, length: int, tokens: int, fit: bool, text: str) -> Iterator[Update]:
        shown = {side: ("", "") for side in SIDES}

        def update(status: str) -> Update:
            return (status, *shown["original"], *shown["converted"])

        try:
            filled = text.strip() or " ".join(bundled_words())
            ids = pair.inputs(prompt, int(length), filled)
            yield update(f"converting to {mechanism}" + (", fitting it" if fit else ""))
            pair.convert(mechanism, fit, filled)
            for side, model in zip(SIDES, (pair.original, pair.converted), strict=True):
                for shown[side] in write(model, pair.tokenizer, ids, int(tokens)):
                    yield update(f"{side} writes")
            yield update("done")
        except (HfLinattnError, ValueError, RuntimeError) as error:
            yield update(f"**Not done:** {error}")

    with gr.Blocks(title="hf_linattn") as page:
        gr.Markdown(f"{INTRODUCTION}\n\nModel: `{Path(name).name if Path(name).is_dir() else name}`")
        prompt = gr.Textbox("Return the", label="Prompt", lines=2)
        with gr.Row():
            mechanism = gr.Dropdown(choices(), value=FIRST[0], label="Mechanism")
            length = gr.Slider(64, pair.longest, value=min(2048, pair.longest), step=1, label="Context, tokens")
            tokens = gr.Slider(8, MOST_TOKENS, value=64, step=1, label="Tokens to write")
        with gr.Accordion("Text that fills the context", open=False):
            text = gr.Textbox("", label="Empty: the first chapters of Alice's Adventures in Wonderland", lines=4)
            fit = gr.Checkbox(False, label="Fit the mechanism to the original on this text first")
        button, status = gr.Button("Write", variant="primary"), gr.Markdown("")
        outputs: list[Any] = [status]
        with gr.Row():
            for side in SIDES:
                with gr.Column():
                    outputs += [gr.Textbox(label=side, lines=12), gr.Markdown("")]
        given = [prompt, mechanism, length, tokens, fit, text]
        button.click(talk, given, outputs, api_name="talk", concurrency_limit=1)
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The original and a converted model side by side, in a page.")
    parser.add_argument("--model", default=os.environ.get("MODEL", str(BUNDLED)), help="a folder or a name on the Hub")
    page_of(parser.parse_args().model).launch()
