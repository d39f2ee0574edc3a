"""Write the models and prompts of the benchmarks below BENCH_ROOT. What exists is left alone.

    python models.py NAME ...

| name            | what it is |
|---|---|
| qwen3-8b        | configuration only, Qwen3-8B's dimensions: for speed, loaded with dummy weights |
| deepseek-wide   | configuration only, DeepSeek-V3's widths (hidden 7,168), 12 layers of 32 experts: for TP |
| qwen3-truth     | seeded bf16, Qwen3-8B's widths, 8 layers |
| deepseek-truth  | seeded bf16, MLA and grouped MoE routing, 8 layers |
| kimi-truth      | the same inside Kimi-K2.5's multimodal wrapper, under the checkpoint's names, one routing group |
| prompts.jsonl   | about 600,000 random tokens in prompts of lognormal length, for speed |
| long.jsonl      | about 900,000 of the same kind |
| short.jsonl     | 10,000 prompts of 30 tokens on average, for what grows with their number |
| truth.jsonl     | 24 prompts of 5 to 900 tokens |

Dummy weights prove nothing about values; seeded ones are scaled to keep the residual stream alive in every layer.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import DATA, MODELS

SPEED_TOKENS = 600_000
LONG_TOKENS = 900_000
SHORT_PROMPTS = 10_000
LONGEST = 4000
TRUTH_LENGTHS = (5, 17, 33, 50, 64, 100, 129, 200, 257, 333, 400, 511, 512, 513, 600, 640, 700, 750, 800, 850, 880,
                 890, 899, 900)  # fmt: skip
TRUTH_VOCABULARY = 4096

QWEN3: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
MLA: dict[str, Any] = {
    "n_shared_experts": 1, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "noaux_tc",
    "moe_layer_freq": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_theta": 10000.0, "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
DEEPSEEK_TRUTH = {
    **MLA, "vocab_size": TRUTH_VOCABULARY, "hidden_size": 2048, "intermediate_size": 4096,
    "moe_intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_routed_experts": 32, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
}  # fmt: skip
KIMI_TRUTH = {**DEEPSEEK_TRUTH, "n_group": 1, "topk_group": 1}
DEEPSEEK_WIDE = {
    **MLA, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 32,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
}  # fmt: skip

IMAGE_PROCESSOR = """from transformers import BaseImageProcessor


class BenchImageProcessor(BaseImageProcessor):
    num_frames_per_chunk = 4

    def __init__(self, media_proc_cfg=None, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg

    def media_tokens_calculator(self, media):
        return 1
"""
"""As much of an image processor as vLLM asks for before it serves prompts without images."""


def qwen3_8b(out: Path) -> None:
    _config(out, {
        **QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36,
        "vocab_size": 151936, "hidden_act": "silu", "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
        "attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645,
    })  # fmt: skip
    _tokenizer(out, 151936)  # for the row that is served


def deepseek_wide(out: Path) -> None:
    _config(out, {
        **DEEPSEEK_WIDE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
    })  # fmt: skip


def qwen3_truth(out: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**QWEN3, vocab_size=TRUTH_VOCABULARY, num_hidden_layers=8)
    _seeded(Qwen3ForCausalLM, config).save_pretrained(out)


def deepseek_truth(out: Path) -> None:
    _deepseek(out, DEEPSEEK_TRUTH)


def kimi_truth(out: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from tools.tiny_models import MEDIA, MEDIA_TOKEN, VISION_OF_CHECKPOINT

    scratch = out.with_name(f".{out.name}.text")
    _deepseek(scratch, KIMI_TRUTH)
    text = {f"language_model.{k}": v for path in scratch.glob("*.safetensors") for k, v in load_file(path).items()}
    shutil.rmtree(scratch)
    shapes = json.loads(Path(__file__).with_name("kimi_vision.json").read_text())
    shapes["mm_projector.proj.2.weight"][0] = shapes["mm_projector.proj.2.bias"][0] = KIMI_TRUTH["hidden_size"]
    vision = {name: torch.randn(shape).to(torch.bfloat16) * 0.02 for name, shape in shapes.items()}
    save_file({**text, **vision}, out / "model.safetensors", metadata={"format": "pt"})
    inner = {
        **KIMI_TRUTH, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16",
    }  # fmt: skip
    _config(out, {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": inner,
        # vLLM divides the vision tower's heads among the ranks, too: eight of them go as far as the text's.
        "vision_config": {**VISION_OF_CHECKPOINT, "num_attention_heads": 8}, "projection_hidden_size": 64,
        "image_token_id": MEDIA_TOKEN, "media_placeholder_token_id": MEDIA_TOKEN,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    })  # fmt: skip
    # Releases of transformers and vLLM disagree on the image processor's name, so the checkpoint brings its own.
    (out / "image_processing_bench.py").write_text(IMAGE_PROCESSOR)
    (out / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "media_proc_cfg": MEDIA, "image_processor_type": "BenchImageProcessor",
                "auto_map": {"AutoImageProcessor": "image_processing_bench.BenchImageProcessor"},
            }
        )
    )  # fmt: skip
    _tokenizer(out)


def _deepseek(out: Path, dimensions: dict[str, Any]) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    _seeded(DeepseekV3ForCausalLM, DeepseekV3Config(**dimensions)).save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    # transformers drops these; without `topk_method` vLLM builds no router bias and fails at its tensor.
    config.update(topk_method=dimensions["topk_method"], scoring_func=dimensions["scoring_func"])
    _config(out, config)


def _seeded(kind: Any, config: Any) -> Any:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = kind(config).eval()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, 1)
            elif parameter.dim() > 1:
                parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    return model


def _tokenizer(out: Path, vocabulary: int = TRUTH_VOCABULARY) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t2"))  # noqa: S106 - a word, no password
    special = {"unk_token": "t2", "bos_token": "t0", "eos_token": "t1"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(out)


def _config(out: Path, record: dict[str, Any]) -> None:
    (out / "config.json").write_text(json.dumps(record, indent=1) + "\n")


def speed_prompts(path: Path, tokens: int = SPEED_TOKENS) -> None:
    generator = random.Random(0)  # noqa: S311 - test data
    total = 0
    with path.open("w") as file:
        while total < tokens:
            length = min(int(generator.lognormvariate(6.7, 0.6)) + 16, LONGEST)
            total += length
            ids = [generator.randrange(10, 120000) for _ in range(length)]
            file.write(json.dumps({"input_ids": ids}) + "\n")


def long_prompts(path: Path) -> None:
    speed_prompts(path, LONG_TOKENS)


def short_prompts(path: Path) -> None:
    generator = random.Random(2)  # noqa: S311 - test data
    with path.open("w") as file:
        for _ in range(SHORT_PROMPTS):
            ids = [generator.randrange(10, 120000) for _ in range(generator.randrange(10, 51))]
            file.write(json.dumps({"input_ids": ids}) + "\n")


def truth_prompts(path: Path) -> None:
    generator = random.Random(1)  # noqa: S311 - test data
    with path.open("w") as file:
        for length in TRUTH_LENGTHS:
            ids = [generator.randrange(10, TRUTH_VOCABULARY - 10) for _ in range(length)]
            file.write(json.dumps({"input_ids": ids}) + "\n")


WRITERS: dict[str, Callable[[Path], None]] = {
    "qwen3-8b": qwen3_8b, "deepseek-wide": deepseek_wide, "qwen3-truth": qwen3_truth,
    "deepseek-truth": deepseek_truth, "kimi-truth": kimi_truth,
}  # fmt: skip
PROMPTS: dict[str, Callable[[Path], None]] = {
    "prompts.jsonl": speed_prompts, "long.jsonl": long_prompts, "short.jsonl": short_prompts,
    "truth.jsonl": truth_prompts,
}  # fmt: skip


def main(names: list[str]) -> int:
    for name in names or [*WRITERS, *PROMPTS]:
        target = (DATA if name in PROMPTS else MODELS) / name
        if target.exists():
            continue
        scratch = target.with_name(f".{name}.new")
        scratch.parent.mkdir(parents=True, exist_ok=True)
        if name in PROMPTS:
            PROMPTS[name](scratch)
        else:
            scratch.mkdir(exist_ok=True)
            WRITERS[name](scratch)
        scratch.rename(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
