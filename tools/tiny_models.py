"""Write small models that real vLLM loads on a CPU, and a small data set of chats.

    python tools/tiny_models.py OUT_DIR [NAME ...]

Names (all of them by default); each becomes a folder of OUT_DIR, except `chats.jsonl`:

| name                     | what it is |
|---|---|
| kimi-k25-tiny            | Kimi-K2.5-shaped: multimodal wrapper over a DeepSeek-V3 (MLA + MoE) text model; the real checkpoint's names |
| qwen3-tiny               | dense, grouped-query attention, fused residual |
| deepseek-v3-tiny         | MLA + MoE without a wrapper |
| deepseek-v3-llama4-tiny  | the same weights with `llama_4_scaling` set: layers take one more argument |
| deepseek-v3-deep-tiny    | the same kind with 24 layers, in shards of 20 MB with an index, as a real checkpoint has |
| qwen3-moe-tiny           | grouped-query attention, every layer with experts |
| llama-tiny               | dense, no norms of queries and keys |
| mistral-sliding-tiny     | dense, attention within a window of 32 tokens |
| qwen3-int8-tiny          | qwen3-tiny, linear layers in int8 with a scale a channel, inputs quantised a token |
| kimi-k25-bad-rank        | configuration only, `kv_lora_rank` 64: loads with dummy weights, fails at the first step |
| chats.jsonl              | 64 short chats |

Weights are seeded fp32 and every norm and router bias is perturbed, so that a wrong layer, a forgotten norm or a
tensor under the wrong name changes the states visibly; dummy weights (`load_format="dummy"`) would leave early
boundaries bitwise equal and prove nothing. Kimi is loaded with `limit_mm_per_prompt={"vision_chunk": 0}`.
What exists whole is left alone.
"""  # noqa: E501 - a table row cannot be folded

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 1024
MEDIA_TOKEN = 1000
FIRST, LAST, UNKNOWN = "<s>", "</s>", "<unk>"
SPECIAL = {
    0: FIRST, 1: LAST, MEDIA_TOKEN: "<|media_pad|>", 1001: UNKNOWN,
    1002: "<|system|>", 1003: "<|user|>", 1004: "<|assistant|>", 1005: "<|end|>",
}  # fmt: skip
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ ' <|' + message['role'] + '|> ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + ' <|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + ' <|end|>' }}{% endif %}{% endfor %}"
)
DEEP_LAYERS = 24
LAYERS = 8  # the smallest depth at which eagle3's [2, N//2, N-3, N] are four different boundaries
MAX_POSITIONS = 1024

# MLA kernels accept only kv_lora_rank 512 with a rotary part of 64, so these two cannot shrink.
MLA: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 8, "n_shared_experts": 1,
    "n_routed_experts": 8, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 96,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_layer_freq": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_POSITIONS,
}  # fmt: skip
SLIDING_WINDOW = 32
INT8: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    }},
}  # fmt: skip
LLAMA_4_SCALING = {"original_max_position_embeddings": 16, "beta": 0.2}
VISION: dict[str, Any] = {
    "patch_size": 14, "num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
}  # fmt: skip
VISION_OF_CHECKPOINT = {
    **VISION, "merge_kernel_size": [2, 2], "init_pos_emb_height": 8, "init_pos_emb_width": 8,
    "init_pos_emb_time": 4, "mm_hidden_size": 64, "projector_hidden_act": "gelu",
}  # fmt: skip
MEDIA = {
    "in_patch_limit": 16384, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 4096, "in_patch_limit_video": None, "sample_fps": 2.0,
    "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
}  # fmt: skip


def kimi(out: Path) -> None:
    """Write kimi-k25-tiny, its tensors named as in the published checkpoint."""
    from safetensors.torch import load_file, save_file
    from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25ForConditionalGeneration

    _kimi_config(out, MLA)
    config = Kimi_K25Config(
        text_config={**MLA, "model_type": "deepseek_v3"}, vision_config=VISION, projection_hidden_size=64,
        image_token_id=MEDIA_TOKEN, tie_word_embeddings=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        _seeded(Kimi_K25ForConditionalGeneration(config)).save_pretrained(scratch)
        state = load_file(Path(scratch) / "model.safetensors")
    renamed = {_checkpoint_name(name): value for name, value in state.items()}
    save_file(renamed, out / "model.safetensors", metadata={"format": "pt"})


def _checkpoint_name(name: str) -> str:
    # transformers saves some text tensors under names that the published checkpoint does not have.
    return name if name.startswith("vision") else name.removeprefix("model.").replace(".blocks.", ".layers.")


def kimi_bad_rank(out: Path) -> None:
    """Write a configuration that vLLM accepts and whose attention then refuses its head dimension."""
    _kimi_config(out, {**MLA, "kv_lora_rank": 64})


def _kimi_config(out: Path, text: dict[str, Any]) -> None:
    text = {**text, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "float32"}
    _write_json(out / "config.json", {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
        "vision_config": VISION_OF_CHECKPOINT, "projection_hidden_size": 64, "image_token_id": MEDIA_TOKEN,
        "media_placeholder_token_id": MEDIA_TOKEN, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    })  # fmt: skip
    _write_json(out / "preprocessor_config.json", {"media_proc_cfg": MEDIA})
    _write_tokenizer(out)


def qwen(out: Path) -> None:
    """Write qwen3-tiny."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _seeded(Qwen3ForCausalLM(Qwen3Config(**DENSE, head_dim=64))).save_pretrained(out)
    _write_tokenizer(out)


def qwen_moe(out: Path) -> None:
    """Write qwen3-moe-tiny."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **DENSE, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    )
    _seeded(Qwen3MoeForCausalLM(config)).save_pretrained(out)
    _write_tokenizer(out)


def llama(out: Path) -> None:
    """Write llama-tiny."""
    from transformers import LlamaConfig, LlamaForCausalLM

    _seeded(LlamaForCausalLM(LlamaConfig(**DENSE))).save_pretrained(out)
    _write_tokenizer(out)


def mistral_sliding(out: Path) -> None:
    """Write mistral-sliding-tiny."""
    from transformers import MistralConfig, MistralForCausalLM

    _seeded(MistralForCausalLM(MistralConfig(**DENSE, sliding_window=SLIDING_WINDOW))).save_pretrained(out)
    _write_tokenizer(out)


def qwen_int8(out: Path) -> None:
    """Write qwen3-int8-tiny, as llm-compressor writes its W8A8 checkpoints."""
    import torch
    from safetensors.torch import load_file, save_file

    qwen(out)
    state = {}
    for name, value in load_file(out / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            state[name] = value
            continue
        scale = value.abs().amax(1, keepdim=True) / 127
        state[name] = (value / scale).round().clamp(-127, 127).to(torch.int8)
        state[name + "_scale"] = scale
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = INT8
    _write_json(out / "config.json", config)


def deepseek(out: Path) -> None:
    """Write deepseek-v3-tiny."""
    _deepseek(out, {})


def deepseek_deep(out: Path) -> None:
    """Write deepseek-v3-deep-tiny."""
    _deepseek(out, {}, {**MLA, "num_hidden_layers": DEEP_LAYERS}, max_shard_size="20MB")


def deepseek_llama4(out: Path) -> None:
    """Write deepseek-v3-llama4-tiny: queries are scaled by their position, beginning at position 16."""
    _deepseek(out, {"llama_4_scaling": LLAMA_4_SCALING})


def _deepseek(out: Path, extra: dict[str, Any], text: dict[str, Any] = MLA, **saving: Any) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    _seeded(DeepseekV3ForCausalLM(DeepseekV3Config(**text))).save_pretrained(out, **saving)
    config = json.loads((out / "config.json").read_text())
    # transformers drops `topk_method`; without it vLLM builds no router bias and fails at its tensor in the file.
    config.update(extra, topk_method=MLA["topk_method"], scoring_func=MLA["scoring_func"])
    _write_json(out / "config.json", config)
    _write_tokenizer(out)


def _seeded(model: Any) -> Any:
    import torch

    torch.manual_seed(0)
    model = model.to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model


def _write_tokenizer(out: Path) -> None:
    """A word is a token: "t17" is 17. The template marks the assistant's part for the loss mask."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {SPECIAL.get(number, f"t{number}"): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL.values()])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=FIRST, eos_token=LAST, chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(out)


def chats(path: Path, count: int = 64, seed: int = 0) -> None:
    """Write `count` chats of one to three turns, 10 to 150 tokens each, one JSON object a line."""
    generator = random.Random(seed)  # noqa: S311 - test data

    def words(least: int, most: int) -> str:
        return " ".join(f"t{generator.randrange(10, MEDIA_TOKEN)}" for _ in range(generator.randint(least, most)))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = [{"role": "system", "content": words(2, 8)}] if generator.random() < 0.5 else []
            for _ in range(generator.randint(1, 3)):
                messages.append({"role": "user", "content": words(3, 20)})
                messages.append({"role": "assistant", "content": words(3, 24)})
            file.write(json.dumps({"messages": messages}) + "\n")


def _write_json(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


MODELS: dict[str, Callable[[Path], None]] = {
    "kimi-k25-tiny": kimi,
    "qwen3-tiny": qwen,
    "deepseek-v3-tiny": deepseek,
    "deepseek-v3-llama4-tiny": deepseek_llama4,
    "deepseek-v3-deep-tiny": deepseek_deep,
    "qwen3-moe-tiny": qwen_moe,
    "llama-tiny": llama,
    "mistral-sliding-tiny": mistral_sliding,
    "qwen3-int8-tiny": qwen_int8,
    "kimi-k25-bad-rank": kimi_bad_rank,
}
CHATS = "chats.jsonl"


def write(name: str, root: Path) -> Path:
    """Write the model or data set `name` below `root` unless it is there, and return its path.

    It appears under its name only when whole, so several processes may do this at once. Raises KeyError for an
    unknown name.
    """
    target = root / name
    if target.exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=root))
    try:
        made = scratch / name
        if name == CHATS:
            chats(made)
        else:
            made.mkdir()
            MODELS[name](made)
        try:
            os.rename(made, target)
        except OSError:
            if not target.exists():  # another process was faster: its copy is as good
                raise
    finally:
        shutil.rmtree(scratch)
    return target


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    names = arguments[1:] or [*MODELS, CHATS]
    unknown = [name for name in names if name not in MODELS and name != CHATS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join([*MODELS, CHATS])}", file=sys.stderr)
        return 2
    for name in names:
        print(write(name, Path(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
