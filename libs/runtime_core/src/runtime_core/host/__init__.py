"""Wires consumers, leaders and connections into processes: services, an app in one process, a whole machine.

1. `service` starts a service by name (`__main__`): one process that runs the roles of a `host`.
2. `app_services` wires the services that run an app: agent-handler, tool-handler and gateways. `state_manager` wires
   the state-manager, and `host` the trajectory-recorder and the HTTP gateway.
3. `local` runs an app inside another program; `stack` and `supervisor` run all services on one machine.
"""
