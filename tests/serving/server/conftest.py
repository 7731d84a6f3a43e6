from collections.abc import Iterator

import pytest
from tests.serving.server.serving import Running, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server for the tests of a file."""
    with serving() as running:
        yield running
