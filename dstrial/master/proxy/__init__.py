"""Proxies ``/proxy/<task>/…`` over HTTP and WebSocket for users who are logged in."""

from dstrial.master.proxy.http_proxy import ProxyMiddleware
from dstrial.master.proxy.websocket_proxy import websocket_protocol

__all__ = ["ProxyMiddleware", "websocket_protocol"]
