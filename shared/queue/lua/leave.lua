-- ARGV: fence, why the run trains no more or ''. The current trainer stops in order: what it held caused no crash.
-- Returns 0, or -1 if fenced. `begin` clears the reason.
if redis.call('HGET', ST, 'fence') ~= ARGV[1] then return -1 end
redis.call('HSET', ST, 'progressed', 1)
if ARGV[2] ~= '' then redis.call('HSET', ST, 'refused', ARGV[2]) end
return 0
