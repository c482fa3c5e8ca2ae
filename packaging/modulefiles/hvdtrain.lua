-- Lmod: put this file into MODULEPATH as hvdtrain/VERSION.lua, and set `root` to the environment that
-- `make setup`, or `pip install` and `hvdtrain setup`, made. See docs/how-to/containers.md.
local root = os.getenv("HVDTRAIN_ROOT") or "/opt/hvdtrain"

help([[
hvdtrain trains image classifiers on many processes, with Horovod and MPI.
  hvdtrain doctor        checks this machine
  hvdtrain train --help  lists the options
]])
whatis("Name: hvdtrain")
whatis("Version: " .. myModuleVersion())
whatis("Description: Trains image classifiers on many processes and explains what it got for them")

-- With hvdtrain setup --mpi system, the module of the MPI that it was built for:
-- depends_on("openmpi")

if not isFile(pathJoin(root, "bin", "hvdtrain")) then
    LmodError("hvdtrain is not in " .. root .. ": set root in this modulefile, or HVDTRAIN_ROOT")
end
prepend_path("PATH", pathJoin(root, "bin"))
setenv("VIRTUAL_ENV", root)
