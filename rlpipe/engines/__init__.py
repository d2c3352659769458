"""The two engines: SGLang samples, Megatron trains. The only places that import those packages."""
