"""Reverse proxy ``/proxy/<task>/…`` (HTTP, WebSocket) for authenticated users."""

from dstrial.master.proxy.http_proxy import ProxyMiddleware
from dstrial.master.proxy.websocket_proxy import websocket_protocol

__all__ = ["ProxyMiddleware", "websocket_protocol"]
