"""Waiting for a lab's cluster outlasts a server that is away or busy, and no refusal."""

import pytest
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from examples.lab.control_plane import until
from examples.processes import ExampleError


def test_a_server_that_is_away_or_has_too_much_to_do_is_waited_for() -> None:
    passing = [OSError(), HTTPError(), ApiException(429), ApiException(500), ApiException(504)]
    ahead: list[Exception] = list(passing)

    def met() -> bool:
        if ahead:
            raise ahead.pop()
        return True

    until(met, "it is met")
    assert not ahead
    ahead = passing * 1000
    with pytest.raises(ExampleError, match="in vain until it is met"):
        until(met, "it is met", seconds=0.2)


@pytest.mark.parametrize("status", [403, 404, 422])
def test_what_the_server_refuses_is_not_waited_for(status: int) -> None:
    def met() -> bool:
        raise ApiException(status)

    with pytest.raises(ApiException, match=str(status)):
        until(met, "it is met")
