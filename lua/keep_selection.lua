-- keep_selection(selection; before, value, milliseconds) -> {verdict}
--
-- Change the state of one selection of a client, if no other client has changed it meanwhile. The same call may arrive
-- twice.
--
-- KEYS  selection     string, PX  the state of the selection
-- ARGV  before        the value that the caller knows; empty for none
--       value         the new value, which no other client writes; empty removes the key
--       milliseconds  how long the value is kept
--
-- {'applied'}  written, now or by the same call before
-- {'other'}    the key has another value; nothing written

local now = redis.call('GET', KEYS[1]) or ''
if now ~= ARGV[1] and now ~= ARGV[2] then return {'other'} end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return {'applied'}
