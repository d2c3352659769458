"""SGLang: the server process, the router, the admin client of one engine. The only place that
imports sglang."""
