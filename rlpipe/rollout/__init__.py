"""Sampling groups of responses from the engines through the router. Knows HTTP, not SGLang's
package."""
