"""The versions of vLLM that are served, which needs no vLLM."""

import pytest

from tilepress.formats import UsageError
from tilepress.runtime.vllm.compat import check_version


@pytest.mark.parametrize("version", ["0.24.0", "0.24.1+cu130", "0.32.0", "0.33.0rc1"])
def test_versions_that_serve(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.23.9", "0.34.0", "1.24.0", "dev"])
def test_other_versions_are_named_with_those_that_serve(version):
    with pytest.raises(UsageError) as raised:
        check_version(version)
    assert (
        version in raised.value.message
        and "0.24 to 0.33" in raised.value.message
        and "pip install" in raised.value.hint
    )
