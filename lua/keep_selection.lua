-- keep_selection(selection; before, value, milliseconds) -> {verdict}
--
-- Change what one selection of a client has come to, if nobody else has changed it meanwhile.
--
-- KEYS  selection     string, PX  the state of the selection
-- ARGV  before        the value that the caller knows; empty: none
--       value         the new value; empty: the key is removed
--       milliseconds  how long the value is kept
--
-- {'applied'}  written
-- {'other'}    the key has another value; nothing written

if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return {'other'} end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return {'applied'}
