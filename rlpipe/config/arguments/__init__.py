"""Arguments that Megatron-core, SGLang and its router receive under their own names.

`names` has the names, types and defaults of each version (`{table}-{version}.json`), or of a
Megatron-LM checkout (`checkout`). `table` has the arguments that rlpipe restricts, with reasons.
`check` applies both to a configuration; trainer and engines apply it again. No module here imports
torch, megatron or sglang.
"""
