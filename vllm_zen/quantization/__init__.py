"""Quantizing any checkpoint on load: `--quantization zen_int8` and `zen_int4`.

settings.py  what a user may choose, and which scheme a layer gets
weights.py   a weight quantized and packed, slab by slab
methods.py   what vLLM's layers call
export.py    a quantized checkpoint for any vLLM: `vllm-zen quantize`
config.py    what vLLM is told: the two methods by name
"""
