"""Stock vLLM as a rollout engine: the same permit, weights and turns as SGLang's."""
