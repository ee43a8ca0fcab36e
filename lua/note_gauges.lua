-- note_gauges(record, gauges; milliseconds, value) -> {verdict}
--
-- Write what an engine reports of itself. Redis removes the value if no newer one replaces it in time.
--
-- KEYS  record        hash        the publisher's record
--       gauges        string, PX  what its engine reported last
-- ARGV  milliseconds  how long the value counts
--       value         the gauges, as JSON
--
-- {'applied'}  written
-- {'gone'}     the publisher is not registered any more; nothing written

if redis.call('EXISTS', KEYS[1]) == 0 then return {'gone'} end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[1])
return {'applied'}
