"""Proxies ``/proxy/<task>/…`` over HTTP and WebSocket for users who are logged in."""

from dstrial.master.proxy.http_proxy import Front
from dstrial.master.proxy.websocket_proxy import tunnel_protocol

__all__ = ["Front", "tunnel_protocol"]
