"""Causes in what is loaded and in what was asked for: checkpoint, configuration, arguments, prompts."""

from __future__ import annotations

from controller.core.triage_entry import Entry, pattern

ARGUMENTS_OF_FIELDS = {
    "CacheConfig.cache_dtype": "kv_cache_dtype",
    "LoRAConfig.target_modules": "lora_target_modules",
    "SchedulerConfig.policy": "scheduling_policy",
}
"""What a playbook calls the fields of vLLM's configuration that have other names than their engine arguments."""

ARGUMENTS_OF_WORDS = {
    "attention backend": "attention_backend",
    "Mamba SSU backend": "mamba_backend",
    "Mamba SSU algorithm": "mamba_ssu_algorithm",
    "quantization method": "quantization",
}
"""What vLLM calls, in its own words, an argument whose value it does not know."""

ENTRIES = (
    Entry(
        code="refused-by-job",
        what="{detail}",
        why="the job looked at its data, model and output, and ended before it loaded or wrote anything",
        fix="put right what it names, then run it again",
        exception=pattern(r"^(remote_payload\.extract\.settings\.)?ConfigError: (?P<detail>.+)"),
        frames=pattern(r"/remote_payload/extract/\w+\.py"),
    ),
    Entry(
        code="head-size",
        what="no attention kernel of this vLLM takes the model's head size",
        why="MLA kernels need `kv_lora_rank` 512 and `qk_rope_head_dim` 64, others a few head sizes",
        fix="check `kv_lora_rank`, `qk_rope_head_dim` and `head_dim` in config.json, or try another "
        "VLLM_ATTENTION_BACKEND in `env`",
        exception=pattern(
            r"[Hh]ead(_| )(size|dim(ension)?) \d+ is not supported|[Uu]nsupported head.?(size|dim)"
            r"|No valid attention backend.{0,400}head_size not supported|head_size \(?\d+\)? not supported"
        ),
    ),
    Entry(
        code="topk-method",
        what="config.json lacks `topk_method`, so the router's bias has no place to go",
        why="checkpoints saved by transformers drop the key; vLLM then builds the router without a correction bias",
        fix='add `"topk_method": "noaux_tc"` to config.json (to `text_config` of a multimodal model)',
        exception=pattern(r"KeyError: '(?P<name>\S+e_score_correction_bias)'"),
    ),
    Entry(
        code="state-count",
        what="vLLM returned fewer hidden states than were asked for",
        why="some versions drop the last boundary of some models without a word (DeepSeek before 0.28)",
        fix='use `path = "auto"` in [capture]: what is not proved natively is captured by hooks',
        exception=pattern(r"expanded size of the tensor \(\d+\) must match the existing size \(\d+\)"),
        frames=pattern(r"extract_hidden_states\.py"),
    ),
    Entry(
        code="state-count",
        what="the engine returned fewer hidden states than were asked for",
        why="some versions drop the last boundary of some models without a word (DeepSeek before 0.28)",
        fix='use `path = "auto"` in [capture]: what is not proved natively is captured by hooks',
        exception=pattern(r"CaptureError: .*(gave no state at boundaries|does not prove boundaries)"),
    ),
    Entry(
        code="layer-signature",
        what="a decoder layer is called with other arguments than this vLLM's takes",
        why="layers differ by model and version: the order, a residual, `llama_4_scaling`",
        fix='do not call layers: use `path = "auto"` or "hooks" in [capture]; `ctl preflight` shows the signature',
        exception=pattern(r"TypeError: (?P<name>\w*DecoderLayer)\.forward\(\) (missing|takes|got)"),
    ),
    Entry(
        code="layer-signature",
        what="a decoder layer that other code than vLLM's calls failed on what it was given",
        why="layers differ by model and version: the order of arguments, a residual, `llama_4_scaling`",
        fix='do not call layers: use `path = "auto"` or "hooks" in [capture]; `ctl preflight` shows the signature',
        exception=pattern(r"^(TypeError|AttributeError|RuntimeError: .{0,60}(size|shape|dimension|dtype))"),
        frames=pattern(
            r'File "(?!\S*/(vllm|site-packages|dist-packages)/)[^"]+", line \d+, in \w*forward\n'
            r"[^\n]*\blayer\([^\n]*\n"
        ),
    ),
    Entry(
        code="embedding-method",
        what="the model has no method `{name}`: this vLLM calls it otherwise",
        why="`get_input_embeddings` became `embed_input_ids` in 0.12",
        fix="use ctl's own worker, or call the method that `ctl preflight` shows",
        exception=pattern(
            r"AttributeError: '\w+' object has no attribute '(?P<name>get_input_embeddings|embed_input_ids)'"
        ),
    ),
    Entry(
        code="embedding-method",
        what="the model's `{name}` is not the one that the caller means",
        why="`get_input_embeddings` became `embed_input_ids` in 0.12",
        fix="use ctl's own worker, or call the method that `ctl preflight` shows",
        exception=pattern(r"TypeError: \S*\.(?P<name>get_input_embeddings|embed_input_ids)\(\) (missing|takes|got)"),
    ),
    Entry(
        code="shard-truncated",
        what="a weight file is not whole",
        fix="copy the files again and compare `sha256sum *.safetensors`; `ctl preflight` names the file",
        exception=pattern(
            r"SafetensorError: .*(incomplete metadata|[Hh]eader.{0,20}(too (large|small)|invalid)|InvalidHeader"
            r"|HeaderToo|MetadataIncomplete|not fully covered)"
        ),
    ),
    Entry(
        code="shard-missing",
        what="a weight file is missing",
        fix="copy the files again; `ctl preflight` compares the folder with the index",
        exception=pattern(
            r"Cannot find any model weights with|weights were not initialized from checkpoint"
            r"|(FileNotFoundError|OSError)(?!.*' -> ').{0,200}model-\d+-of-\d+\.safetensors"
        ),
    ),
    Entry(
        code="weights-config",
        what="the weights do not fit config.json",
        why="a tensor has another shape than the configuration gives it",
        fix="check that config.json and the weights are of one checkpoint and revision",
        exception=pattern(
            r"Attempted to load weight \(|(size|shape) mismatch|The size of tensor a \(\d+\) must match"
            r"|^AssertionError$|start \(\d+\) \+ length \(\d+\) exceeds dimension size"
        ),
        frames=pattern(r"in (weight_loader\w*|load_\w+_weight|default_weight_loader|load_(merged_)?column_weight)\b"),
    ),
    Entry(
        code="remote-code",
        what="the model needs its own Python code, which was not allowed",
        fix="read that code, then set `trust_remote_code = true` in [model]",
        exception=pattern(
            r"requires you to execute the (configuration|configure|custom|repo)\S* |contains custom code"
            r"|set(ting)? (the option )?`?trust_remote_code=True"
        ),
    ),
    Entry(
        code="tokenizer",
        what="the tokenizer cannot be loaded",
        fix="copy tokenizer.json and tokenizer_config.json of the checkpoint into the model's folder",
        exception=pattern(
            r"Can't load tokenizer for|Couldn't instantiate the backend tokenizer|Error while loading tokenizer"
            r"|does not appear to have a file named token\w+\.\w+|Tokenizer class \S+ does not exist"
            r"|data did not match any variant of untagged enum ModelWrapper"
        ),
    ),
    Entry(
        code="architecture",
        what="this vLLM does not know the model's architecture {name}",
        fix="use a vLLM that has it (docs/compatibility.md), or correct `architectures` in config.json",
        exception=pattern(
            r"Model architectures \[(?P<name>[^\]]*)\] (are not supported|failed to be inspected)"
            r"|does not recognize this architecture|has no vLLM implementation"
        ),
    ),
    Entry(
        code="config-broken",
        what="config.json cannot be read",
        fix="copy it again from the checkpoint: `python3 -m json.tool config.json` must pass",
        exception=pattern(r"config file at '[^']+' is not a valid JSON file"),
    ),
    Entry(
        code="prompt-too-long",
        what="a prompt is longer than `max_model_len`",
        fix="raise `max_model_len` in [engine] above the longest prompt by one, or lower `max_seq_len` in [data]",
        exception=pattern(
            r"prompt.{0,30}\(length \d+\).{0,20} is longer than the maximum model length"
            r"|maximum context length is \d+ tokens"
            r"|[Pp]rompt length.{0,40}(exceeds|longer than).{0,40}(max_model_len|maximum)"
        ),
    ),
    Entry(
        code="max-model-len",
        what="`max_model_len` is larger than the model allows",
        fix="lower `max_model_len` in [engine] to what the message names",
        exception=pattern(r"User-specified max_model_len \(\d+\) is greater than the derived"),
    ),
    Entry(
        code="engine-argument",
        what="this vLLM does not know the engine argument `{name}`",
        fix="correct or remove it in [engine] of the playbook",
        exception=pattern(r"EngineArgs\.__init__\(\) got an unexpected keyword argument '(?P<name>[^']+)'"),
        line=pattern(r"error: unrecognized arguments: (?P<name>\S+)"),
    ),
    Entry(
        code="engine-value",
        what="[engine] `{name}` is {detail}, and should be {wanted}",
        why="this vLLM refuses the value: its configuration is checked before anything is loaded",
        fix="correct it in [engine] of the playbook",
        exception=pattern(
            r"ValidationError: \d+ validation errors? for (?P<owner>\w+)\n(?P<name>\w+)(\.[\w-]+(\[[^\n]*\])?)?\n"
            r"\s+Input should be (?P<wanted>[^\n]+?)(, unable to [^\n]+?)? "
            r"\[type=\w+, input_value=(?P<detail>[^\n]+), input_type=\w+\]"
        ),
        frames=pattern(r"/vllm/engine/arg_utils\.py"),
        renamed=ARGUMENTS_OF_FIELDS,
    ),
    Entry(
        code="engine-value",
        what="[engine] `{name}` is {detail}, and should be one of {wanted}",
        why="this vLLM refuses the value: its configuration is checked before anything is loaded",
        fix="correct it in [engine] of the playbook",
        exception=pattern(
            r"Unknown (?P<name>attention backend|Mamba SSU backend|Mamba SSU algorithm|quantization method): "
            r"(?P<detail>'[^'\n]+'|[^\s'.]+)\. (Valid options are: |Must be one of \[)(?P<wanted>[^\n\]]+)"
        ),
        frames=pattern(r"/vllm/engine/arg_utils\.py"),
        renamed=ARGUMENTS_OF_WORDS,
    ),
    Entry(
        code="heads",
        what="{detail} attention heads cannot be divided among {name} ranks",
        why="vLLM gives as many to each rank of `tensor_parallel_size`",
        fix="set `tensor_parallel_size` in [engine] of the playbook to a divisor of {detail}",
        exception=pattern(
            r"Total number of attention heads \((?P<detail>\d+)\) must be divisible by tensor parallel size "
            r"\((?P<name>\d+)\)"
        ),
    ),
    Entry(
        code="heads",
        what="{detail}, a size of the model, cannot be divided among {name} ranks",
        why="vLLM gives each rank of `tensor_parallel_size` as much; most often it is the heads of a vision tower",
        fix="set `tensor_parallel_size` in [engine] of the playbook to a divisor of {detail}, or, of a vision tower, "
        '`mm_encoder_tp_mode = "data"`',
        exception=pattern(r"^AssertionError: (?P<detail>\d+) is not divisible by (?P<name>\d+)$"),
        frames=pattern(r"/vllm/distributed/utils\.py\", line \d+, in (divide|ensure_divisibility)\b"),
    ),
    Entry(
        code="cores-per-rank",
        what="VLLM_CPU_OMP_THREADS_BIND gives cores to another number of ranks than there are: {detail}",
        why="it is a list of cores for each rank, divided by |",
        fix="in [env] of the playbook give as many lists as `tensor_parallel_size`, or leave it out",
        exception=pattern(
            r"AssertionError: Given number of CPU id list (?P<detail>\[.*?\] doesn't match local world size \d+)"
        ),
    ),
    Entry(
        code="port-taken",
        what="a port that vLLM wants is taken",
        fix="`ss -ltnp` on the host shows by whom; end it, or choose another port (VLLM_PORT, MASTER_PORT)",
        exception=pattern(r"Address already in use|EADDRINUSE"),
    ),
    Entry(
        code="lease-taken",
        what="another run holds the GPUs: {detail}",
        fix="`ctl ps` shows whose it is: wait for it, or `ctl stop` it if it is yours",
        ends=frozenset({"lease-busy", "lease-dirty"}),
    ),
)
