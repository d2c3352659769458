"""Arguments of Megatron-core, SGLang and its router that go to them under their own names.

`names` knows the names, types and defaults that each version has (`{table}-{version}.json`, and a
Megatron-LM checkout's own: `checkout`). `table` says which of them are not free, and why. `check`
applies both to a configuration; the trainer and the engines apply it again to what they are given.
Nothing here imports torch, megatron or sglang.
"""
