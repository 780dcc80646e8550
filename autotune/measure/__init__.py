"""From a running endpoint and a schedule to numbers with intervals. Knows nothing of vLLM's flags."""
