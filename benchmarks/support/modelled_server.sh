#!/usr/bin/env bash
# Start vLLM with modelled steps (modelled_vllm.py) in the foreground; `exec`, so that this process is the API server's.
# HOPTRACE_VLLM_PYTHON: the Python that has vLLM. Arguments: PORT, then any of vLLM's own.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
port=$1; shift
model=${MODELLED_MODEL:-$(mktemp -d)}
cat > "$model/config.json" <<JSON
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
 "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 4096,
 "torch_dtype": "float32"}
JSON
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=1 OMP_NUM_THREADS=1
exec "$HOPTRACE_VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name toy --host 127.0.0.1 \
  --port "$port" --load-format dummy --skip-tokenizer-init --dtype float32 --block-size 32 --max-model-len 4096 --enforce-eager \
  --generation-config vllm --scheduler-cls modelled_vllm.Recorded --distributed-executor-backend modelled_vllm.Nothing "$@"
