-- Lmod: put @PREFIX@/modulefiles/lua into MODULEPATH, then "module load elastic".
help([[elastic @VERSION@: train on preemptible Slurm partitions without losing work. elastic --help]])
whatis("Name: elastic")
whatis("Version: @VERSION@")
prepend_path("PATH", "@PREFIX@/@VERSION@/bin")
if (myShellName() == "bash" and mode() == "load") then
    execute{cmd="source @PREFIX@/@VERSION@/etc/completion.bash", modeA={"load"}}
end
