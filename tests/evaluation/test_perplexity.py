"""Perplexity against a token-by-token loop that shares nothing with it but the model."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from hf_linattn import original_attention, patch_model, unpatch_model
from hf_linattn.errors import DataError, OptionError, UnsupportedModelError
from hf_linattn.evaluation import Perplexity, is_masked_language_model, next_token, perplexity, position_limit

SPECIAL = ["<|end|>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = {token: index for index, token in enumerate([*SPECIAL, *map(str, range(60))])}
POSITIONS = 32
SIZES = {"vocab_size": len(VOCABULARY), "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=POSITIONS, **SIZES)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **SIZES,
        )
    ),
    "bert": lambda: BertForMaskedLM(
        BertConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=POSITIONS,
            vocab_size=len(VOCABULARY),
            initializer_range=0.3,
        )
    ),
}
ATTENTIONS = ["original", "linear", "performer"]


def make_model(name: str, attention: str = "original"):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    return model if attention == "original" else patch_model(model, attention)


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<|end|>", eos_token="<|end|>")


@pytest.fixture(scope="module")
def masked_tokenizer():
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[PAD]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", VOCABULARY["[CLS]"]), ("[SEP]", VOCABULARY["[SEP]"])]
    )
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


@pytest.fixture(scope="module")
def texts():
    generator = torch.Generator().manual_seed(1)
    lengths = (23, 1, 8, 0, 2, 11)
    return [" ".join(map(str, torch.randint(60, (n,), generator=generator).tolist())) for n in lengths]


def log_likelihood(model, context, token):
    return model(torch.tensor([context]), use_cache=False).logits[0, -1].log_softmax(-1)[token].item()


@torch.no_grad()
def causal_reference(model, tokenizer, texts, max_length, stride):
    """One full forward per token, over the context that the first window to reach the token gives it."""
    total, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        for t in range(1, len(ids)):
            begin = stride * max(0, math.ceil((t + 1 - max_length) / stride))
            assert t - begin >= min(t, max_length - stride)
            total -= log_likelihood(model, ids[begin:t], ids[t])
            count += 1
    return total / count, count


@pytest.mark.covering(2)
@pytest.mark.parametrize("stride", [1, 4, 9])  # 4 and 9 divide neither the window nor the longest document
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_causal_equals_token_by_token(name, attention, stride, tokenizer, texts):
    model = make_model(name, attention)
    loss, count = causal_reference(model, tokenizer, texts, 10, stride)
    result = perplexity(model, tokenizer, texts, max_length=10, stride=stride, batch_size=3, progress=False)
    assert result["num_tokens"] == count == 22 + 7 + 1 + 10
    assert result["loss"] == pytest.approx(loss, rel=1e-10)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-10)


def test_a_pad_token_that_the_model_has_no_embedding_for_is_not_read(tokenizer, texts):
    model, padded = make_model("llama"), copy.deepcopy(tokenizer)
    padded.add_special_tokens({"pad_token": "[OTHER PAD]"})
    assert padded.pad_token_id >= model.config.vocab_size
    options = {"max_length": 10, "batch_size": 3, "progress": False}
    assert perplexity(model, padded, texts, **options) == perplexity(model, tokenizer, texts, **options)


def test_default_stride_is_half_a_window(tokenizer, texts):
    model = make_model("llama")
    default = perplexity(model, tokenizer, texts, max_length=12, progress=False)
    assert default == perplexity(model, tokenizer, texts, max_length=12, stride=6, progress=False)
    assert default["loss"] != perplexity(model, tokenizer, texts, max_length=12, stride=11, progress=False)["loss"]


def test_of_a_limit_every_document_has_its_share_of_first_tokens(tokenizer, texts):
    model = make_model("llama")
    limited = perplexity(model, tokenizer, texts, max_length=6, max_tokens=30, progress=False)
    cut = [" ".join(text.split()[:9]) for text in texts]  # 1 + 8 + 0 + 2, and 9 of both longer ones
    assert limited == {**perplexity(model, tokenizer, cut, max_length=6, progress=False), "document_tokens": 9}
    assert perplexity(model, tokenizer, cut, max_length=6, max_tokens=29, progress=False) == {
        name: x for name, x in limited.items() if name != "document_tokens"
    }
    with pytest.raises(OptionError, match="max_tokens"):
        perplexity(model, tokenizer, texts, max_length=6, max_tokens=0)


def test_of_a_limit_that_leaves_each_document_less_than_a_window_fewer_are_read(tokenizer, texts):
    model, many = make_model("llama"), [" ".join(str((7 * i + n) % 60) for n in range(9)) for i in range(40)]
    limited = perplexity(model, tokenizer, many, max_length=6, max_tokens=70, progress=False)
    read = {"num_documents": 11, "document_tokens": 6}
    assert {name: limited[name] for name in read} == read and limited["num_tokens"] == 11 * 5
    chosen = [" ".join(many[(2 * i + 1) * 40 // 22].split()[:6]) for i in range(11)]
    assert limited == {**perplexity(model, tokenizer, chosen, max_length=6, progress=False), **read}
    few = perplexity(model, tokenizer, many, max_length=6, max_tokens=4, progress=False)
    assert few["num_documents"] == 1 and few["document_tokens"] == 4, "more documents than tokens"


def test_logits_that_are_many_are_made_a_few_positions_at_a_time(tokenizer, texts, monkeypatch):
    model, made = make_model("llama", "linear"), []
    whole = perplexity(model, tokenizer, texts, max_length=10, progress=False)
    monkeypatch.setattr(next_token, "LOGITS", 8 * 3 * len(VOCABULARY))
    model.lm_head.register_forward_hook(lambda *call: made.append(call[2].shape[:2].numel()))
    parts = perplexity(model, tokenizer, texts, max_length=10, progress=False)
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-12) and parts["num_tokens"] == whole["num_tokens"]
    assert max(made) == 8 * 3


def test_documents_do_not_see_each_other(tokenizer, texts):
    model = make_model("llama")
    alone = [perplexity(model, tokenizer, [texts[i]], max_length=16, progress=False) for i in (0, 5)]
    both = perplexity(model, tokenizer, [texts[0], texts[5]], max_length=16, progress=False)
    assert both["num_tokens"] == sum(a["num_tokens"] for a in alone)
    assert both["loss"] * both["num_tokens"] == pytest.approx(
        sum(a["loss"] * a["num_tokens"] for a in alone), rel=1e-12
    )


@torch.no_grad()
def masked_reference(model, tokenizer, texts, max_length, seed, probability):
    """Window by window and mask by mask, without batches or padding."""
    generator = torch.Generator().manual_seed(seed)
    total, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        draws = torch.rand(len(ids), generator=generator).tolist()
        chosen = [i for i, draw in enumerate(draws) if draw < probability and ids[i] >= len(SPECIAL)]
        shown = [VOCABULARY["[MASK]"] if i in chosen else token for i, token in enumerate(ids)]
        for i in chosen:
            begin = i - i % max_length
            logits = model(torch.tensor([shown[begin : begin + max_length]])).logits[0, i - begin]
            total -= logits.log_softmax(-1)[ids[i]].item()
            count += 1
    return total / count, count


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("probability", [0.15, 0.5])
def test_masked_equals_mask_by_mask(attention, probability, masked_tokenizer, texts):
    model = make_model("bert", attention)
    loss, count = masked_reference(model, masked_tokenizer, texts, 10, 3, probability)
    options = {"max_length": 10, "seed": 3, "mask_probability": probability, "progress": False}
    result = perplexity(model, masked_tokenizer, texts, batch_size=4, **options)
    assert result["num_tokens"] == count
    assert result["loss"] == pytest.approx(loss, rel=1e-10)


def test_masks_depend_on_the_seed_alone(masked_tokenizer, texts):
    counts = set()
    for attention in ATTENTIONS:
        for batch_size in (1, 4):
            torch.manual_seed(batch_size)
            model = make_model("bert", attention)
            result = perplexity(model, masked_tokenizer, texts, max_length=16, batch_size=batch_size, progress=False)
            counts.add(result["num_tokens"])
    assert len(counts) == 1
    model = make_model("bert")
    losses = {
        perplexity(model, masked_tokenizer, texts, max_length=16, seed=s, progress=False)["loss"] for s in range(4)
    }
    assert len(losses) == 4


def test_special_tokens_are_never_masked(masked_tokenizer, texts):
    result = perplexity(
        make_model("bert"), masked_tokenizer, texts, max_length=16, mask_probability=1.0, progress=False
    )
    assert result["num_tokens"] == 23 + 1 + 8 + 2 + 11


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_batch_size_changes_nothing(name, attention, request, texts):
    tokenizer = request.getfixturevalue("masked_tokenizer" if name == "bert" else "tokenizer")
    model = make_model(name, attention)
    results = [
        perplexity(model, tokenizer, texts, max_length=16, batch_size=size, progress=False) for size in (1, 3, 50)
    ]
    assert len({result["num_tokens"] for result in results}) == 1
    for result in results[1:]:
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(name, request, texts):
    tokenizer = request.getfixturevalue("masked_tokenizer" if name == "bert" else "tokenizer")
    model = make_model(name)
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    result = perplexity(model, tokenizer, texts, max_length=16, mask_probability=0.5, progress=False)
    assert result["perplexity"] == pytest.approx(len(VOCABULARY), rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_that_is_no_number_names_the_model_and_what_to_look_at(name, request, texts, tmp_path):
    tokenizer = request.getfixturevalue("masked_tokenizer" if name == "bert" else "tokenizer")
    make_model(name).save_pretrained(tmp_path)
    model = type(make_model(name)).from_pretrained(tmp_path)
    path, weight = list(model.named_parameters())[3]
    with torch.no_grad():
        weight[0] = torch.nan
    said = f"the loss of {type(model).__name__} {str(tmp_path)!r} is nan, .*; its weight {path!r} is not finite either"
    with pytest.raises(OptionError, match=said):
        perplexity(model, tokenizer, texts, max_length=16)
    overflowing = make_model(name).float()
    overflowing.get_output_embeddings().weight.data.normal_().mul_(5e37)
    message = f"the loss of {type(model).__name__} is (nan|inf), .*; its weights are finite: load it in float32"
    with pytest.raises(OptionError, match=message):
        perplexity(patch_model(overflowing, "linear"), tokenizer, texts, max_length=16)


def test_modes_and_random_state_are_left_alone(masked_tokenizer, texts):
    model = make_model("bert").train()
    model.bert.encoder.layer[0].eval()
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    first = perplexity(model, masked_tokenizer, texts, max_length=16, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert first == perplexity(model.eval(), masked_tokenizer, texts, max_length=16, progress=False)  # no dropout


def test_original_attention_of_a_patched_model(tokenizer, texts):
    expected = perplexity(make_model("gpt2"), tokenizer, texts, max_length=16, progress=False)
    model = make_model("gpt2", "linear")
    with original_attention(model):
        assert perplexity(model, tokenizer, texts, max_length=16, progress=False) == expected
    assert perplexity(model, tokenizer, texts, max_length=16, progress=False)["loss"] != expected["loss"]


@pytest.mark.parametrize(
    "options, field",
    [
        ({"max_length": 1}, "max_length"),
        ({"max_length": POSITIONS + 1}, f"max_length must be 2 to {POSITIONS}"),
        ({"max_length": 16, "stride": 16}, "stride"),
        ({"max_length": 16, "stride": 0}, "stride"),
        ({"max_length": 16, "batch_size": 0}, "batch_size"),
        ({"max_length": 16, "mask_probability": 0.0}, "mask_probability"),
    ],
)
def test_options_out_of_range(options, field, tokenizer, texts):
    with pytest.raises(OptionError, match=field):
        perplexity(make_model("gpt2"), tokenizer, texts, progress=False, **options)


def test_masked_models_have_no_stride(masked_tokenizer, texts):
    with pytest.raises(OptionError, match="stride=4"):
        perplexity(make_model("bert"), masked_tokenizer, texts, max_length=16, stride=4, progress=False)


@pytest.mark.parametrize("bad", ["1 2 3", [], ["", "5", ""]])
def test_text_that_cannot_be_scored(bad, tokenizer):
    with pytest.raises(DataError, match="texts"):
        perplexity(make_model("gpt2"), tokenizer, bad, max_length=16, progress=False)


def test_masked_model_without_mask_token(tokenizer, texts):
    with pytest.raises(DataError, match="mask_token"):
        perplexity(make_model("bert"), tokenizer, texts, max_length=16, progress=False)


def test_which_kind_of_model():
    assert is_masked_language_model(make_model("bert", "linear"))
    assert not is_masked_language_model(make_model("llama", "linear"))
    with pytest.raises(UnsupportedModelError, match="BertModel"):
        is_masked_language_model(BertModel(make_model("bert").config))


@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
def test_a_causal_model_that_reads_what_it_is_to_predict_is_refused(mechanism, tokenizer, texts):
    encoder, config = make_model("bert").config, copy.deepcopy(make_model("bert").config)
    config.is_decoder = True
    assert not is_masked_language_model(BertLMHeadModel(config))
    assert not is_masked_language_model(patch_model(BertLMHeadModel(config), mechanism))
    for model in (BertLMHeadModel(encoder), patch_model(BertLMHeadModel(encoder), mechanism)):
        with pytest.raises(UnsupportedModelError, match=r"^BertLMHeadModel attends both ways .* is_decoder=True, or"):
            perplexity(model, tokenizer, texts, max_length=16, progress=False)


def test_position_limit():
    assert [position_limit(make_model(name)) for name in ("gpt2", "bert", "llama")] == [POSITIONS, POSITIONS, None]
    assert position_limit(make_model("gpt2", "linear")) == POSITIONS
    roberta = RobertaForMaskedLM(
        RobertaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=POSITIONS,
            vocab_size=len(VOCABULARY),
        )
    )
    assert position_limit(roberta) == POSITIONS - 2  # its first two positions belong to padding


@pytest.mark.parametrize(("name", "mechanism", "limit"), [
    ("llama", "synthesizer", 40), ("gpt2", "synthesizer", 24), ("llama", "cosformer", 40), ("llama", "linear", None),
])  # fmt: skip
def test_position_limit_of_mechanisms(name, mechanism, limit):
    model = make_model(name)
    patch_model(model, mechanism, **({} if limit is None else {"max_length": limit}))
    assert position_limit(model) == limit
    assert position_limit(unpatch_model(model)) == (POSITIONS if name == "gpt2" else None)


def test_metric_equals_function_and_survives_an_error(tokenizer, texts, tmp_path):
    model, metric = make_model("llama", "linear"), Perplexity(cache_dir=str(tmp_path))
    options = {"max_length": 16, "stride": 5, "progress": False}
    with pytest.raises(DataError):
        metric.compute(texts=[""], model=model, tokenizer=tokenizer, **options)
    result = metric.compute(texts=texts, model=model, tokenizer=tokenizer, **options)
    assert result == perplexity(model, tokenizer, texts, **options)
