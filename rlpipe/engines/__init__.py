"""The two engines: SGLang samples and Megatron trains. Only this package imports them."""
