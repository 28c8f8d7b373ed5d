"""The job's small key-value store: what the first instance decided at start-up, and later ones repeat."""

from __future__ import annotations

from typing import Any

from lightning_parcae.control.messages import Reply, Request


class StartupValues:
    """Values that are written once. Pure: questions in, answers out."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._waiting: dict[str, list[tuple[str, int]]] = {}

    def handle(self, instance: str, request: Request) -> list[tuple[str, Reply]]:
        """Answer a request, and those that waited for it.

        Returns:
            The receivers and their answers.
        """
        key = request.key
        if request.op == "set_default":
            answers = []
            if key not in self._values:
                self._values[key] = request.value
                answers = [(name, Reply(number, request.value)) for name, number in self._waiting.pop(key, [])]
            return [(instance, Reply(request.request, self._values[key])), *answers]
        if request.op == "get" or key in self._values:
            return [(instance, Reply(request.request, self._values.get(key)))]
        self._waiting.setdefault(key, []).append((instance, request.request))
        return []

    def give_up(self, key: str, instance: str, value: Any) -> list[Reply]:
        """Answer the questions of one instance that waits for a key that nobody will set."""
        waiting = self._waiting.get(key, [])
        self._waiting[key] = [item for item in waiting if item[0] != instance]
        return [Reply(number, value) for name, number in waiting if name == instance]

    def waiting_for(self, prefix: str) -> list[tuple[str, str]]:
        """Return the keys with a prefix for which somebody waits, each with who does."""
        keys = [key for key in self._waiting if key.startswith(prefix)]
        return [(key, name) for key in keys for name in dict.fromkeys(name for name, _ in self._waiting[key])]

    def forget(self, instance: str) -> None:
        """Drop the questions of an instance that is gone."""
        for key in list(self._waiting):
            left = [item for item in self._waiting[key] if item[0] != instance]
            if left:
                self._waiting[key] = left
            else:
                del self._waiting[key]
