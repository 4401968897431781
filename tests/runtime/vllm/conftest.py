"""What vLLM's engine takes from the environment."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        }.items():
            patch.setenv(name, value)
        yield
