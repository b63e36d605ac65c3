"""An event loop whose clock jumps from timer to timer: plain asyncio code in virtual time."""
