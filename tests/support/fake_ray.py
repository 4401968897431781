"""A stand-in for Ray that runs tasks in this process: what was asked of it, and how many tasks there were at a time."""

import types


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """`memory` is what its one machine has."""

    def __init__(self):
        self.memory, self.asked, self.most_at_once, self.is_up, self.started = 10**12, [], 0, False, {}

    def modules(self) -> dict[str, types.ModuleType]:
        ray, exceptions, strategies = (types.ModuleType(name) for name in ("ray", "exceptions", "strategies"))
        exceptions.RayError, exceptions.RayTaskError = RayError, RayTaskError
        strategies.NodeAffinitySchedulingStrategy = lambda node, soft: (node, soft)
        ray.exceptions = exceptions
        for name in ("init", "shutdown", "remote", "put", "get", "wait", "nodes", "cancel", "get_runtime_context"):
            setattr(ray, name, getattr(self, name))
        ray.cluster_resources = dict
        return {"ray": ray, "ray.exceptions": exceptions, "ray.util.scheduling_strategies": strategies}

    def init(self, **how):
        self.is_up, self.started = True, how

    def shutdown(self):
        self.is_up = False

    def nodes(self) -> list[dict]:
        resources = {"CPU": 4.0, "memory": float(self.memory)}
        return [{"NodeID": "a1", "Alive": True, "Resources": resources, "NodeManagerHostname": "other"}]

    def remote(self, function):
        def options(**asked):
            def start(*words):
                self.asked.append(asked)
                return lambda: function(*words)

            return types.SimpleNamespace(remote=start)

        return types.SimpleNamespace(options=options)

    def put(self, value):
        return value

    def get(self, ref):
        try:
            return ref()
        except Exception as error:
            raise RayTaskError(error) from error

    def wait(self, refs, num_returns, timeout):
        self.most_at_once = max(self.most_at_once, len(refs))
        return refs[:num_returns], refs[num_returns:]

    def cancel(self, ref, force):
        pass

    def get_runtime_context(self):
        return types.SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1.0}, get_node_id=lambda: "driver")
