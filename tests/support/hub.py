"""Tiny random models of the ``transformers`` package, four layers each unless the family says otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 4
COMMON: dict[str, Any] = {"attn_implementation": "sdpa"}
DECODER: dict[str, Any] = {
    **COMMON,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _ids(length: int = 12, batch: int = 2, low: int = 3) -> Tensor:
    return torch.randint(low, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def causal_step(model: nn.Module) -> Tensor:
    ids = _ids()
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss


def vision_step(model: nn.Module) -> Tensor:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model(pixel_values=pixels, labels=torch.tensor([0, 1])).loss


def encoder_decoder_step(model: nn.Module) -> Tensor:
    return model(input_ids=_ids(), labels=_ids(7)).loss


def llama(t: Any) -> nn.Module:
    return t.LlamaForCausalLM(t.LlamaConfig(**DECODER))


def mistral(t: Any) -> nn.Module:
    return t.MistralForCausalLM(t.MistralConfig(**DECODER, sliding_window=8))


def qwen3(t: Any) -> nn.Module:
    return t.Qwen3ForCausalLM(t.Qwen3Config(**DECODER, head_dim=8))


def gemma(t: Any) -> nn.Module:
    return t.GemmaForCausalLM(t.GemmaConfig(**DECODER, head_dim=8))


def gpt2(t: Any) -> nn.Module:
    config = t.GPT2Config(
        **COMMON, vocab_size=64, n_positions=64, n_embd=32, n_layer=LAYERS, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = t.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else the choice of the loss logs, which breaks the graph
    return model


def opt(t: Any) -> nn.Module:
    config = t.OPTConfig(
        **COMMON, vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0, attention_dropout=0.0, layerdrop=0.0,
        use_cache=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return t.OPTForCausalLM(config)


def bert(t: Any) -> nn.Module:
    config = t.BertConfig(
        **COMMON, vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return t.BertForMaskedLM(config)


def vit(t: Any) -> nn.Module:
    config = t.ViTConfig(
        **COMMON, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, image_size=16,
        patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
        problem_type="single_label_classification",  # else the first call sets it, and the second one recompiles
    )  # fmt: skip
    return t.ViTForImageClassification(config)


def t5(t: Any) -> nn.Module:
    config = t.T5Config(
        **COMMON, vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=LAYERS, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return t.T5ForConditionalGeneration(config)


def mixtral(t: Any, experts: str = "grouped_mm") -> nn.Module:
    config = t.MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2)
    model = t.MixtralForCausalLM(config)
    model.set_experts_implementation(experts)
    return model
