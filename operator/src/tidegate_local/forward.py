"""A loopback forwarder: accepts on a socket made outside, connects inside the namespace that it runs in.

Run by path, standard library only, by `cluster`: `forward.py LISTENING_DESCRIPTOR HOST PORT`
"""

import asyncio
import socket
import sys
from contextlib import suppress

CHUNK_BYTES = 1 << 16


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until the sender has finished, then say so to the receiver, who may still have to answer."""
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def serve(listener: socket.socket, host: str, port: int) -> None:
    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A refused or broken connection is passed on as a closed one: what it means is for the two ends to say.
        with suppress(OSError):
            try:
                far_reader, far_writer = await asyncio.open_connection(host, port)
                try:
                    async with asyncio.TaskGroup() as both:
                        both.create_task(copy(reader, far_writer))
                        both.create_task(copy(far_reader, writer))
                except* OSError:
                    far_writer.transport.abort()
                    writer.transport.abort()
                else:
                    far_writer.close()
            finally:
                writer.close()

    server = await asyncio.start_server(join, sock=listener)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
